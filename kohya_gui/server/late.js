// Answers that arrive after they are no longer wanted.

/**
 * Note what a request is about. Returns a function that says whether that is still the same: an answer about anything
 * else is out of date.
 * @param {() => unknown} subject such as the chosen run, or the number of the newest request
 */
export function noteSubject(subject) {
  const before = subject();
  return () => subject() === before;
}
