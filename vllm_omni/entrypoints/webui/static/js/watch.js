// SPDX-License-Identifier: Apache-2.0
// Notices a picture that has gone flat or broken: for some seconds without a pause it has far less detail than the world's
// first pictures had (fog, a dark screen), or detail everywhere (a mosaic). Knows no server.
//
// Detail is the mean step of brightness between neighbours, in each of 60 parts of the picture at 80x48. Measured on the
// village: of 150 views, the quieter fifth of the parts has at most 2.9 and the livelier fifth at least 3.3 (99 % of
// them); of 60 mosaics the former has 2.9 to 9.4, of 90 foggy and dark pictures the latter has less than 3.3 in 84 %.

const EVERY_MS = 250;
const LASTS_MS = 3000;
const REFERENCES = 8; // pictures from which the world's usual values are taken
const [WIDTH, HEIGHT, SIDE] = [80, 48, 8];
const QUIET = 0.2; // the share of the parts that are quieter than the value `quiet`
const LIVELY = 0.8;
const LEAST_BUSY = 3; // of the quieter parts; and so many times the usual value:
const BUSY = 4;
const FLAT = 0.3; // of the usual value of the livelier parts
const LEAST_LIVELY = 2; // of a world of which anything can be said

/** Detail of the quieter and of the livelier parts of a picture of 80x48 pixels. `data`: RGBA. */
export function measure(data) {
  const light = (i) => 0.3 * data[4 * i] + 0.6 * data[4 * i + 1] + 0.1 * data[4 * i + 2];
  const parts = new Float32Array((WIDTH / SIDE) * (HEIGHT / SIDE));
  for (let y = 0; y < HEIGHT; y++) {
    for (let x = 0; x < WIDTH; x++) {
      const next = y * WIDTH + Math.max(1, x);
      const part = Math.floor(y / SIDE) * (WIDTH / SIDE) + Math.floor(x / SIDE);
      parts[part] += Math.abs(light(next) - light(next - 1)) / SIDE ** 2;
    }
  }
  parts.sort();
  return { quiet: parts[Math.floor(QUIET * parts.length)], lively: parts[Math.floor(LIVELY * parts.length)] };
}

export class Watch {
  #canvas = new OffscreenCanvas(WIDTH, HEIGHT);
  #usual = []; // of the world's first pictures
  #lookedAt = 0;
  #badSince = null;

  /** A new world, whose first pictures give its usual values. */
  reset() {
    [this.#usual, this.#badSince] = [[], null];
  }

  /** Another picture comes, which has its own three seconds. */
  forgive() {
    this.#badSince = null;
  }

  /** Look at the picture that is drawn now. */
  look(canvas, now = performance.now()) {
    if (now - this.#lookedAt < EVERY_MS) return;
    this.#lookedAt = now;
    const context = this.#canvas.getContext("2d", { willReadFrequently: true });
    context.imageSmoothingQuality = "medium";
    context.drawImage(canvas, 0, 0, WIDTH, HEIGHT);
    this.add(measure(context.getImageData(0, 0, WIDTH, HEIGHT).data), now);
  }

  add(values, now) {
    if (this.#usual.length < REFERENCES) {
      this.#usual.push(values);
      return;
    }
    if (this.#isGood(values)) this.#badSince = null;
    else this.#badSince ??= now;
  }

  /** Whether the last picture looked as usual. */
  get isGood() {
    return this.#badSince === null;
  }

  isBroken(now = performance.now()) {
    return this.#badSince !== null && now - this.#badSince >= LASTS_MS;
  }

  #isGood({ quiet, lively }) {
    const mean = (name) => this.#usual.reduce((sum, values) => sum + values[name], 0) / this.#usual.length;
    const [usualQuiet, usualLively] = [mean("quiet"), mean("lively")];
    if (usualLively < LEAST_LIVELY) return true;
    return quiet <= Math.max(LEAST_BUSY, BUSY * usualQuiet) && lively >= FLAT * usualLively;
  }
}
