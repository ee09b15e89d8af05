// SPDX-License-Identifier: Apache-2.0
// Plays frames at a steady rate from a small buffer. Decodes in order; a server that is slower than its own frame rate
// is played slower, evenly, instead of fast and then frozen. Knows no server.

const SLOWEST = 0.05;

export class Player {
  fps = 16;
  isPaused = false;
  isResting = false; // nothing more is expected: running out is no stall
  numShown = 0;
  numStalls = 0;
  shown = null; // what was drawn last: {bitmap, tag, index, count}
  onframe = () => {};
  #canvas;
  #context;
  #queue = [];
  #coming = 0; // frames that are being decoded
  #decoding = Promise.resolve();
  #generation = 0;
  #rate = 1;
  #due = 0; // frames that should have been shown by now and were not, below 1 while all is well
  #last = null;
  #isStarved = true;
  #times = [];

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { alpha: false });
  }

  /** Milliseconds until the picture would have to wait for another frame. The frame that is shown now counts, too. */
  get bufferedMs() {
    const shownPart = this.#isStarved ? 0 : Math.max(0, 1 - this.#due);
    return ((this.numBuffered + shownPart) * 1000) / (this.fps * this.#rate);
  }

  get numBuffered() {
    return this.#queue.length + this.#coming;
  }

  /** Frames that could be drawn at once. */
  get numReady() {
    return this.#queue.length;
  }

  /** Frames shown in the last second. */
  get shownFps() {
    const now = performance.now();
    this.#times = this.#times.filter((time) => now - time < 1000);
    return this.#times.length;
  }

  get rate() {
    return this.#rate;
  }

  /** Show a picture that is no frame of the video, at the video's size. */
  showStill(picture, width, height) {
    this.#resize(width, height);
    this.#context.drawImage(picture, 0, 0, width, height);
  }

  /**
   * Take frames in order: promises of their pictures, null for one that is lost. `tag` comes back with each frame, which
   * can be drawn as soon as it is decoded. first: its number among the `count` frames of its chunk.
   */
  push(pictures, tag, first = 0, count = pictures.length) {
    const generation = this.#generation;
    this.#coming += pictures.length;
    pictures.forEach((decoding, number) => {
      const index = first + number;
      this.#decoding = this.#decoding.then(async () => {
        const bitmap = await decoding;
        if (generation !== this.#generation) {
          bitmap?.close();
          return;
        }
        this.#coming -= 1;
        if (bitmap) this.#queue.push({ bitmap, tag, index, count });
      });
    });
  }

  /** Tell how fast frames would come if the server were kept busy. It changes when frames are shown, not which. */
  setSupply(framesPerS) {
    this.#rate = Math.min(1, Math.max(SLOWEST, (0.97 * framesPerS) / this.fps));
  }

  /** Forget what was not shown yet; the picture stays. */
  flush() {
    this.#generation += 1;
    for (const { bitmap } of this.#queue) bitmap.close();
    this.#queue = [];
    this.#coming = this.#due = 0;
    this.#isStarved = true;
  }

  /** Draw what is due at `now` (a frame's timestamp). */
  tick(now) {
    const elapsedMs = this.#last === null ? 0 : Math.min(250, now - this.#last);
    this.#last = now;
    if (this.isPaused) return;
    if (this.#isStarved) {
      if (this.#queue.length === 0) return;
      this.#isStarved = false;
      this.#due = 1;
    } else {
      this.#due += (elapsedMs / 1000) * this.fps * this.#rate;
    }
    // At most one frame a tick is drawn; a display slower than the video skips, and says so in `numShown`.
    let next = null;
    while (this.#due >= 1 && this.#queue.length > 0) {
      if (next) this.#retire(next);
      next = this.#queue.shift();
      this.#due -= 1;
    }
    if (next) this.#draw(next);
    if (this.#due >= 1 && this.#queue.length === 0) {
      this.#isStarved = true;
      this.#due = 0;
      if (!this.isResting) this.numStalls += 1;
    }
  }

  #draw(frame) {
    const { bitmap } = frame;
    this.#resize(bitmap.width, bitmap.height);
    this.#context.drawImage(bitmap, 0, 0);
    bitmap.close();
    this.numShown += 1;
    this.#times.push(performance.now());
    this.shown = frame;
    this.onframe(frame);
  }

  #resize(width, height) {
    if (this.#canvas.width === width && this.#canvas.height === height) return;
    [this.#canvas.width, this.#canvas.height] = [width, height];
  }

  #retire(frame) {
    frame.bitmap.close();
    this.onframe(frame);
  }
}
