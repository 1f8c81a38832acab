#!/usr/bin/env bash
# Starts the page in a container or on a rented machine (RunPod, Vast): all persistent files are on the volume, and
# access requires the token, which is in .kohya/token there (or in KOHYA_TOKEN) and is printed at the start.
#   VOLUME=/workspace   PORT=7860   ALLOWED_HOST="*.proxy.example" for a proxy with a name of its own
set -Eeuo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
volume="${VOLUME:-/workspace}"
[ -d "$volume" ] || { printf 'There is no folder %s. Mount a volume there, or set VOLUME to another folder.\n' "$volume" >&2; exit 1; }
# In hidden folders, which the page does not list.
export KOHYA_HOME="${KOHYA_HOME:-$volume/.kohya}" HF_HOME="${HF_HOME:-$volume/.cache/huggingface}"
export UV_CACHE_DIR="${UV_CACHE_DIR:-$volume/.cache/uv}" PIP_CACHE_DIR="${PIP_CACHE_DIR:-$volume/.cache/pip}"

options=(--host 0.0.0.0 --port "${PORT:-7860}" --no-browser --root "$volume")
[ -n "${KOHYA_TOKEN:-}" ] || options+=(--token-file "$volume/.kohya/token")
[ -z "${ALLOWED_HOST:-}" ] || options+=(--allowed-host "$ALLOWED_HOST")
"$here/setup.sh" install
cd "$volume"
exec "$here/setup.sh" gui "${options[@]}" "$@"
