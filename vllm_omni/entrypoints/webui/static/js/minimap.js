// SPDX-License-Identifier: Apache-2.0
// The walk seen from above, drawn to fit: where one was, where one is and looks, and the marks one can go back to.

const MARGIN = 18;
const SMALLEST_SPAN = 0.5; // units; a standing visitor is not magnified beyond this
const MAX_POINTS = 4000;

export class Minimap {
  #canvas;
  #colours = null;
  #path = [];
  #marks = [];

  constructor(canvas) {
    this.#canvas = canvas;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.#colours = null));
  }

  get path() {
    return this.#path.slice();
  }

  setPath(path) {
    this.#path = path.slice();
  }

  setMarks(marks) {
    this.#marks = marks;
  }

  add(place) {
    this.#path.push(place);
    // Old parts of a long walk are kept coarser instead of being cut off.
    if (this.#path.length > MAX_POINTS) {
      this.#path = this.#path.filter((_, i) => i % 2 === 0 || i > this.#path.length - MAX_POINTS / 4);
    }
  }

  describe() {
    const here = this.#path.at(-1);
    if (!here) return "No walk yet.";
    const degrees = Math.round((((here.yaw * 180) / Math.PI) % 360 + 360) % 360);
    return `${Math.hypot(here.x, here.z).toFixed(1)} units from the start, facing ${degrees}°.`;
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [this.#canvas.clientWidth, this.#canvas.clientHeight];
    if (width === 0) return;
    if (this.#canvas.width !== Math.round(width * ratio)) {
      [this.#canvas.width, this.#canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    }
    const context = this.#canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.#colours ??= colours(this.#canvas);
    const toMap = this.#fit(width, height);
    grid(context, toMap, width, height, this.#colours.grid);
    if (this.#path.length === 0) return;
    context.lineWidth = 2;
    context.lineJoin = context.lineCap = "round";
    context.strokeStyle = this.#colours.path;
    context.beginPath();
    for (const place of this.#path) context.lineTo(...toMap.point(place));
    context.stroke();
    disc(context, toMap.point(this.#path[0]), 3, this.#colours.path);
    this.#marks.forEach((mark) => marker(context, toMap.point(mark.place), mark.name, this.#colours));
    visitor(context, toMap.point(this.#path.at(-1)), this.#path.at(-1).yaw, this.#colours.accent);
  }

  #fit(width, height) {
    const all = [...this.#path, ...this.#marks.map(({ place }) => place)];
    const [xs, zs] = [all.map(({ x }) => x), all.map(({ z }) => z)];
    const [left, right] = all.length ? [min(xs), max(xs)] : [0, 0];
    const [near, far] = all.length ? [min(zs), max(zs)] : [0, 0];
    const scale = Math.min(
      (width - 2 * MARGIN) / Math.max(SMALLEST_SPAN, right - left),
      (height - 2 * MARGIN) / Math.max(SMALLEST_SPAN, far - near),
    );
    const [middleX, middleZ] = [(left + right) / 2, (near + far) / 2];
    return {
      scale,
      middle: [middleX, middleZ],
      point: ({ x, z }) => [width / 2 + (x - middleX) * scale, height / 2 - (z - middleZ) * scale],
    };
  }
}

const min = (values) => values.reduce((a, b) => Math.min(a, b));
const max = (values) => values.reduce((a, b) => Math.max(a, b));

function colours(canvas) {
  const style = getComputedStyle(canvas);
  const read = (name) => style.getPropertyValue(name).trim();
  return { grid: read("--line"), path: read("--muted"), accent: read("--accent"), mark: read("--mark"), text: read("--text") };
}

function grid(context, { scale, middle }, width, height, colour) {
  let step = 1;
  while (step * scale > 90) step /= 2;
  while (step * scale < 30) step *= 2;
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let x = Math.ceil((middle[0] - width / 2 / scale) / step) * step; ; x += step) {
    const at = width / 2 + (x - middle[0]) * scale;
    if (at > width) break;
    context.moveTo(at, 0);
    context.lineTo(at, height);
  }
  for (let z = Math.ceil((middle[1] - height / 2 / scale) / step) * step; ; z += step) {
    const at = height / 2 - (z - middle[1]) * scale;
    if (at < 0) break;
    context.moveTo(0, at);
    context.lineTo(width, at);
  }
  context.stroke();
}

function disc(context, [x, y], radius, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

function marker(context, [x, y], name, { mark, text }) {
  disc(context, [x, y], 5, mark);
  context.fillStyle = text;
  context.font = "600 11px system-ui, sans-serif";
  context.fillText(name, x + 8, y + 4);
}

function visitor(context, [x, y], yaw, colour) {
  context.save();
  context.translate(x, y);
  context.rotate(yaw);
  context.fillStyle = colour;
  context.globalAlpha = 0.22;
  context.beginPath();
  context.moveTo(0, 0);
  context.arc(0, 0, 26, -Math.PI / 2 - 0.7, -Math.PI / 2 + 0.7);
  context.fill();
  context.globalAlpha = 1;
  context.beginPath();
  context.moveTo(0, -8);
  context.lineTo(6, 6);
  context.lineTo(0, 3);
  context.lineTo(-6, 6);
  context.fill();
  context.restore();
}
