// SPDX-License-Identifier: Apache-2.0
// Notices a picture that has gone flat or broken: for some seconds without a pause its contrast or its sharpness lies far
// from what the world's first pictures had. Knows no server.

const EVERY_MS = 250;
const LASTS_MS = 3000;
const REFERENCES = 8; // pictures from which the world's usual values are taken
const [WIDTH, HEIGHT] = [80, 48];
const FLATTEST = 0.3; // of the usual contrast
const BLURRIEST = 0.2; // of the usual sharpness
const SHARPEST = 2.5;
const LEAST_CONTRAST = 8; // of a world of which anything can be said

/** Standard deviation and mean step between neighbours of a picture's brightness, 0 to 255. `data`: RGBA. */
export function measure(data, width, height) {
  const light = Float32Array.from({ length: width * height }, (_, i) => 0.3 * data[4 * i] + 0.6 * data[4 * i + 1] + 0.1 * data[4 * i + 2]);
  const mean = light.reduce((sum, value) => sum + value, 0) / light.length;
  const variance = light.reduce((sum, value) => sum + (value - mean) ** 2, 0) / light.length;
  let steps = 0;
  for (let y = 0; y < height; y++) {
    for (let x = 1; x < width; x++) steps += Math.abs(light[y * width + x] - light[y * width + x - 1]);
  }
  return { contrast: Math.sqrt(variance), sharpness: steps / (height * (width - 1)) };
}

export class Watch {
  #canvas = new OffscreenCanvas(WIDTH, HEIGHT);
  #usual = []; // of the world's first pictures
  #lookedAt = 0;
  #badSince = null;

  /** A new world: its first pictures tell what is usual. */
  reset() {
    [this.#usual, this.#badSince] = [[], null];
  }

  /** Another picture comes, which has its own three seconds. */
  forgive() {
    this.#badSince = null;
  }

  /** Look at what is drawn now. */
  look(canvas, now = performance.now()) {
    if (now - this.#lookedAt < EVERY_MS) return;
    this.#lookedAt = now;
    const context = this.#canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0, WIDTH, HEIGHT);
    this.add(measure(context.getImageData(0, 0, WIDTH, HEIGHT).data, WIDTH, HEIGHT), now);
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

  #isGood({ contrast, sharpness }) {
    const mean = (name) => this.#usual.reduce((sum, values) => sum + values[name], 0) / this.#usual.length;
    const [usualContrast, usualSharpness] = [mean("contrast"), mean("sharpness")];
    if (usualContrast < LEAST_CONTRAST) return true;
    return (
      contrast >= FLATTEST * usualContrast && sharpness >= BLURRIEST * usualSharpness && sharpness <= SHARPEST * usualSharpness
    );
  }
}
