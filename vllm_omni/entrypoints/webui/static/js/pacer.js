// SPDX-License-Identifier: Apache-2.0
// When to ask for the next chunk: as late as playback allows, so that the controls it carries are fresh, and never so
// late that the picture waits. Knows only times.

const SMOOTHING = 0.3;
const SPREAD = 2; // typical deviations of the waiting time that are allowed for

export class Pacer {
  marginMs = 120; // what the visitor wants in hand besides
  #meanMs = null;
  #deviationMs = 0;

  /** A chunk came `wallMs` after it was asked for. */
  add(wallMs) {
    if (this.#meanMs === null) this.#meanMs = wallMs;
    this.#deviationMs += SMOOTHING * (Math.abs(wallMs - this.#meanMs) - this.#deviationMs);
    this.#meanMs += SMOOTHING * (wallMs - this.#meanMs);
  }

  /** Whether to ask now. bufferedMs: video in hand; numPending: chunks asked for that have not come. */
  isTime(bufferedMs, numPending) {
    if (numPending > 0) return false;
    if (this.#meanMs === null) return true;
    return bufferedMs <= this.#meanMs + SPREAD * this.#deviationMs + this.marginMs;
  }

  /** Frames a second that a server kept busy would send; null = not known yet. */
  supply(numFrames) {
    return this.#meanMs === null ? null : (numFrames * 1000) / this.#meanMs;
  }

  forget() {
    this.#meanMs = null;
    this.#deviationMs = 0;
  }
}
