// SPDX-License-Identifier: Apache-2.0
// What the visitor does in a world of buttons, axes and a wheel, whatever the device, as the frames of one request.
// `space`: the server's action space (`actions` of its greeting), which says what presses and moves what.
//
// Invariants: a button that was touched between two readings counts, however short the touch was; what the mouse has
// moved is spread over the request's frames, and what a frame's range does not hold is dropped.

const STICK_PIXELS = 24; // a stick at its end moves an axis without an end as so many pixels of the mouse in a frame
const HALF = 0.5;
const WAYS = { up: ["KeyW", "ArrowUp"], left: ["KeyA", "ArrowLeft"], down: ["KeyS", "ArrowDown"], right: ["KeyD", "ArrowRight"] };
const ENDLESS = 1e6;

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

export class Game {
  inputAt = null;
  sensitivity = 1;
  onchange = () => {};
  space = { buttons: [], axes: [], scroll: false, exclusive: false };
  #byCode = new Map(); // code -> button's name
  #held = new Map(); // source of a press -> button's name, the newest last
  #tapped = []; // names pressed since the last reading
  #moved = new Map(); // axis -> units since the last reading
  #sticks = new Map(); // source -> {axis: units a frame}
  #set = new Map(); // axis -> value of its slider
  #notches = 0;

  configure(space) {
    this.space = space;
    this.#byCode = new Map(space.buttons.flatMap(({ name, codes }) => (codes ?? []).map((code) => [code, name])));
    for (const map of [this.#held, this.#moved, this.#sticks, this.#set]) map.clear();
    [this.#tapped, this.#notches, this.inputAt] = [[], 0, null];
  }

  get hasMouse() {
    return this.space.axes.some(({ mouse }) => mouse);
  }

  /** Buttons that something on this page presses, in the space's order. */
  get buttons() {
    return this.space.buttons.filter(({ codes }) => codes?.length);
  }

  /** The buttons that are neither one of the four ways nor a mouse's: a gamepad's face and shoulder buttons. */
  get extras() {
    const ways = new Set(Object.values(WAYS).map((codes) => this.#nameOf(codes)));
    return this.buttons.filter(({ name }) => !ways.has(name));
  }

  get scrolls() {
    return this.space.scroll;
  }

  takes(code) {
    return this.#byCode.has(code);
  }

  press(code) {
    if (this.takes(code)) this.hold(code, this.#byCode.get(code));
  }

  release(code) {
    this.letGo(code);
  }

  /** Hold a button for as long as `source` (a key, a finger, a stick) does. */
  hold(source, name) {
    if (this.#held.get(source) === name) return;
    this.#held.set(source, name);
    this.#tapped.push(name);
    this.#touch();
  }

  letGo(source) {
    if (this.#held.delete(source)) this.#touch();
  }

  releaseAll() {
    const held = this.#held.size + this.#sticks.size;
    this.#held.clear();
    this.#sticks.clear();
    if (held > 0) this.#touch();
  }

  /** The mouse moved by so many pixels, right and down positive. */
  look(dx, dy) {
    for (const { name, mouse, scale } of this.space.axes) {
      const pixels = { x: dx, y: dy }[mouse];
      if (pixels) this.#moved.set(name, (this.#moved.get(name) ?? 0) + pixels * (scale ?? 1) * this.sensitivity);
    }
    if (this.hasMouse) this.#touch();
  }

  /** The wheel turned; up is positive. */
  scroll(notches) {
    if (!this.space.scroll) return;
    this.#notches += notches;
    this.#touch();
  }

  /** A stick that moves: from right and up in [-1, 1] to the buttons of the four ways. */
  walkStick(source, x, y) {
    const isHeld = { up: y > HALF, down: y < -HALF, right: x > HALF, left: x < -HALF };
    for (const [way, codes] of Object.entries(WAYS)) {
      const name = this.#nameOf(codes);
      if (isHeld[way] && name) this.hold(`${source} ${way}`, name);
      else this.letGo(`${source} ${way}`);
    }
  }

  /** A stick that looks: right and up in [-1, 1]; 0, 0 when it is let go. */
  lookStick(source, x, y) {
    const before = this.#sticks.has(source);
    if (!x && !y) {
      if (this.#sticks.delete(source)) this.#touch();
      return;
    }
    const axes = {};
    for (const axis of this.space.axes) {
      const share = { x, y: -y }[axis.mouse];
      if (!share) continue;
      const largest = Math.max(Math.abs(axis.low ?? -ENDLESS), Math.abs(axis.high ?? ENDLESS));
      const full = largest < ENDLESS ? largest * Math.sign(axis.scale ?? 1) : STICK_PIXELS * (axis.scale ?? 1);
      axes[axis.name] = share * full * this.sensitivity;
    }
    this.#sticks.set(source, axes);
    if (!before) this.#touch();
  }

  /** Set an axis that no mouse moves. */
  set(name, value) {
    this.#set.set(name, value);
    this.#touch();
  }

  /** Names of the buttons held now; of an exclusive space, the newest. */
  get held() {
    const names = [...new Set(this.#held.values())];
    return this.space.exclusive ? [...this.#held.values()].slice(-1) : names;
  }

  /** Read everything for one request of `count` latent frames and start collecting anew. */
  take(count) {
    const held = this.held;
    const tapped = this.#tapped.filter((name) => !held.includes(name));
    const first = this.space.exclusive ? (tapped.length > 0 ? tapped.slice(-1) : held) : [...new Set([...held, ...tapped])];
    const axes = {};
    for (const { name, low = -ENDLESS, high = ENDLESS } of this.space.axes) {
      const steered = [...this.#sticks.values()].reduce((sum, values) => sum + (values[name] ?? 0), 0);
      const value = clamp((this.#set.get(name) ?? 0) + steered + (this.#moved.get(name) ?? 0) / count, low, high);
      if (value !== 0) axes[name] = value;
    }
    const sign = Math.sign(this.#notches);
    const frames = Array.from({ length: count }, (_, index) => ({
      buttons: index === 0 ? first : held,
      axes,
      ...(index < Math.abs(this.#notches) ? { scroll: sign } : {}),
    }));
    const reading = { frames, inputAt: this.inputAt };
    this.#moved.clear();
    [this.#tapped, this.#notches, this.inputAt] = [[], 0, null];
    return reading;
  }

  #nameOf(codes) {
    return this.#byCode.get(codes.find((code) => this.takes(code)));
  }

  #touch() {
    this.inputAt ??= performance.now();
    this.onchange();
  }
}
