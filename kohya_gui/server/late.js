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
 * A function that begins a request, and returns one that says whether no other has begun since. Without a request it
 * puts those on their way out of date.
 */
export function countRequests() {
  let newest = 0;
  return () => {
    newest += 1;
    return noteSubject(() => newest);
  };
}

/**
 * The same for answers that are all wanted, in order: those of a poll, which a slow server gives when the next is on
 * its way. The returned function takes an answer; it is false if that of a later request was taken before.
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
