// What is looked for in the page's scripts besides their types, which `tsc` checks (tsconfig.json).
import js from "@eslint/js";

export default [
  { files: ["kohya_gui/**/*.js"] },
  { ignores: ["kohya_gui/vendor/**"] }, // of other projects
  js.configs.recommended,
  {
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "no-undef": "off", // tsc knows what a browser has
      "no-empty": ["error", { allowEmptyCatch: true }], // with the reason behind it
      "no-var": "error",
      "prefer-const": "error",
      "prefer-template": "error",
      eqeqeq: "error",
      complexity: ["error", 20],
      "max-params": ["error", 6],
      "max-len": ["error", { code: 120 }],
      "max-lines-per-function": ["error", { max: 60 }],
    },
  },
];
