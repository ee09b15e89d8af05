// SPDX-License-Identifier: Apache-2.0
// The walk seen from above, drawn to fit: where one was, where one is and looks, and the marks one can go back to, in
// metres and as the server reports it. Under it lies the world's own map, if the server has one.

const MARGIN = 18;
const SMALLEST_SPAN = 5; // metres; a standing visitor is not magnified beyond this
const SMALLEST_ON_MAP = 0.5; // of the map's side
const MAX_POINTS = 4000;

export class Minimap {
  #canvas;
  #colours = null;
  #path = [];
  #marks = [];
  #ground = null; // {image, side}: the world's map and how many metres it covers

  constructor(canvas) {
    this.#canvas = canvas;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.#colours = null));
  }

  /** world: what the server's greeting says of its world, or undefined. */
  setWorld(world) {
    if (!world?.map) {
      this.#ground = null;
    } else if (this.#ground?.file !== world.map.file) {
      const image = new Image();
      image.src = `world/${world.map.file}`;
      this.#ground = { file: world.map.file, image, side: world.map.side_m };
    }
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
    const start = this.#path[0];
    const way = Math.hypot(here.x - start.x, here.z - start.z);
    return `${way.toFixed(1)} m from the start, facing ${degrees}°.`;
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [this.#canvas.clientWidth, this.#canvas.clientHeight];
    if (width === 0) return;
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.#canvas.width !== size[0] || this.#canvas.height !== size[1]) {
      [this.#canvas.width, this.#canvas.height] = size;
    }
    const context = this.#canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.#colours ??= colours(this.#canvas);
    const toMap = this.#fit(width, height);
    const onGround = this.#ground?.image.complete && this.#ground.image.naturalWidth > 0;
    const palette = onGround ? { ...this.#colours, path: "#ffffff", text: "#ffffff" } : this.#colours;
    if (onGround) ground(context, toMap, width, height, this.#ground);
    else grid(context, toMap, width, height, palette.grid);
    if (this.#path.length === 0) return;
    context.lineJoin = context.lineCap = "round";
    context.beginPath();
    for (const place of this.#path) context.lineTo(...toMap.point(place));
    if (onGround) stroke(context, 5, "rgb(0 0 0 / 0.55)");
    stroke(context, 2, palette.path);
    disc(context, toMap.point(this.#path[0]), 3, palette.path);
    this.#placed.forEach((mark) => marker(context, toMap.point(mark.place), mark.name, palette));
    visitor(context, toMap.point(this.#path.at(-1)), this.#path.at(-1).yaw, this.#colours.accent);
  }

  /** Marks whose place is known. */
  get #placed() {
    return this.#marks.filter(({ place }) => place !== null);
  }

  #fit(width, height) {
    const all = [...this.#path, ...this.#placed.map(({ place }) => place)];
    const [xs, zs] = [all.map(({ x }) => x), all.map(({ z }) => z)];
    const [left, right] = all.length ? [min(xs), max(xs)] : [0, 0];
    const [near, far] = all.length ? [min(zs), max(zs)] : [0, 0];
    const span = this.#ground ? SMALLEST_ON_MAP * this.#ground.side : SMALLEST_SPAN;
    const scale = Math.min(
      (width - 2 * MARGIN) / Math.max(span, right - left),
      (height - 2 * MARGIN) / Math.max(span, far - near),
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

/** The map's picture, (0, 0) in its middle, again and again as the world repeats. */
function ground(context, { scale, middle, point }, width, height, { image, side }) {
  const first = (from, length) => Math.floor((from - length / 2 / scale) / side + 0.5);
  for (let i = first(middle[0], width); (i - 0.5) * side < middle[0] + width / 2 / scale; i++) {
    for (let j = first(middle[1], height); (j - 0.5) * side < middle[1] + height / 2 / scale; j++) {
      const [x, y] = point({ x: (i - 0.5) * side, z: (j + 0.5) * side });
      context.drawImage(image, Math.floor(x), Math.floor(y), Math.ceil(side * scale) + 1, Math.ceil(side * scale) + 1);
    }
  }
}

function stroke(context, width, colour) {
  context.lineWidth = width;
  context.strokeStyle = colour;
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
