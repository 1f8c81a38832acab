// Answers that arrive after they are no longer wanted.

/**
 * Note the subject of a request. Returns a function that checks whether it is still the same; otherwise the answer is
 * out of date.
 * @param {() => unknown} subject such as the chosen run
 */
export function noteSubject(subject) {
  const before = subject();
  return () => subject() === before;
}

/**
 * Count requests, of which only the newest matters. The returned function begins a request, and returns a check of
 * whether it is still the newest. Called without a request, it makes the answers to all pending ones out of date.
 */
export function countRequests() {
  let newest = 0;
  return () => {
    newest += 1;
    return noteSubject(() => newest);
  };
}

/**
 * Like `countRequests`, for a poll, whose answers count as long as they arrive in order. The check takes an answer; it
 * returns false if a later request's answer was taken before.
 */
export function keepOrder() {
  let begun = 0, taken = 0;
  return () => {
    const request = ++begun;
    return () => {
      taken = Math.max(taken, request);
      return taken === request;
    };
  };
}
