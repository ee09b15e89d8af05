// SPDX-License-Identifier: Apache-2.0
// When to ask for the next chunk: as late as playback allows, so that the controls it carries are fresh, and never so
// late that the picture waits. Knows only times.
//
// A chunk has two times. Playback needs the waiting time: how long after the request each frame came, less the time at which
// it plays within its chunk. How many frames a server can supply follows from the time of the whole chunk.
//
// The waiting time is learned from a few recent chunks. The first chunk is a guess that the second one replaces (compiling,
// encoding the start image); later a single value far above the others is no measure of what is usual.

const KEPT = 8;
const SPREAD = 3; // mean deviations of the waiting time that are allowed for
const OUTLIER = 2.5; // times the median

export class Pacer {
  marginMs = 40; // what the visitor wants in hand besides; half of it let the picture stop nearly twice as often
  #waits = []; // [waiting ms, ms of the whole chunk, frames], oldest first
  #isGuess = true;

  /** A chunk of `numFrames` was complete `wallMs` after it was asked for. waitMs: the waiting time, if frames came apart. */
  add(wallMs, numFrames, waitMs = wallMs) {
    if (this.#isGuess) {
      this.#isGuess = this.#waits.length === 0;
      this.#waits = [];
    }
    this.#waits.push([waitMs, wallMs, numFrames]);
    if (this.#waits.length > KEPT) this.#waits.shift();
  }

  /** Video that should be in hand when a chunk is asked for, in milliseconds; null = not known yet. */
  get neededMs() {
    const usual = this.#usual();
    return usual && usual.meanMs + SPREAD * usual.deviationMs + this.marginMs;
  }

  /** Whether to ask now. bufferedMs: video in hand; numPending: chunks asked for that have not come. */
  isTime(bufferedMs, numPending) {
    if (numPending > 0) return false;
    return this.neededMs === null || bufferedMs <= this.neededMs;
  }

  /** Frames a second that a server kept busy would send; null = not known yet. */
  supply() {
    const usual = this.#usual();
    return usual && usual.framesPerS;
  }

  forget() {
    this.#waits = [];
    this.#isGuess = true;
  }

  #usual() {
    if (this.#waits.length === 0) return null;
    const sorted = this.#waits.toSorted(([one], [other]) => one - other);
    const [median] = sorted[(sorted.length - 1) >> 1];
    if (sorted.at(-1)[0] > OUTLIER * median) sorted.pop();
    const mean = (value) => sorted.reduce((sum, wait) => sum + value(wait), 0) / sorted.length;
    const meanMs = mean(([ms]) => ms);
    const deviationMs = mean(([ms]) => Math.abs(ms - meanMs));
    return { meanMs, deviationMs, framesPerS: (mean(([, , count]) => count) * 1000) / mean(([, ms]) => ms) };
  }
}
