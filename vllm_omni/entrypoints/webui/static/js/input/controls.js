// SPDX-License-Identifier: Apache-2.0
// What the visitor wants now, whatever the device: axes in [-1, 1] from held keys, sticks and gamepads, degrees from
// mouse drags, and when the oldest input that no request has carried yet was made.
//
// Invariant: a key that was touched between two readings counts, however short the touch was.

export const AXES = ["forward", "right", "up", "yaw", "pitch"];

const zero = () => Object.fromEntries(AXES.map((axis) => [axis, 0]));
const clamp = (value) => Math.min(1, Math.max(-1, value));

export class Controls {
  inputAt = null;
  rises = true; // whether up and down count
  onchange = () => {};
  #keys = new Map(); // key code -> [axis, sign]
  #taps = zero();
  #sticks = new Map(); // source -> {axis: value}
  #turnYaw = 0;
  #turnPitch = 0;

  press(code, axis, sign) {
    if (this.#keys.has(code)) return;
    this.#keys.set(code, [axis, sign]);
    this.#taps[axis] = clamp(this.#taps[axis] + sign);
    this.#touch();
  }

  release(code) {
    if (this.#keys.delete(code)) this.#touch();
  }

  /** Set the axes of one analogue source (a stick, a gamepad); null when it is let go. */
  steer(source, axes) {
    const before = this.#sticks.get(source);
    const same = before && axes && AXES.every((axis) => Math.abs((before[axis] ?? 0) - (axes[axis] ?? 0)) < 0.02);
    if (same || (!before && !axes)) return;
    if (axes) this.#sticks.set(source, axes);
    else this.#sticks.delete(source);
    this.#touch();
  }

  /** Turn by so many degrees, once. */
  turn(yaw, pitch) {
    this.#turnYaw += yaw;
    this.#turnPitch += pitch;
    this.#touch();
  }

  releaseAll() {
    const held = this.#keys.size + this.#sticks.size;
    this.#keys.clear();
    this.#sticks.clear();
    if (held > 0) this.#touch();
  }

  get held() {
    const held = zero();
    for (const [axis, sign] of this.#keys.values()) held[axis] += sign;
    for (const axes of this.#sticks.values()) for (const axis of AXES) held[axis] += axes[axis] ?? 0;
    for (const axis of AXES) held[axis] = clamp(held[axis]);
    return this.rises ? held : { ...held, up: 0 };
  }

  /** Whether something is held, or has been touched since the last reading. */
  get isActive() {
    return this.inputAt !== null || Object.values(this.held).some((value) => value !== 0);
  }

  /** Read everything for one request and start collecting anew. */
  take() {
    const held = this.held;
    const taps = zero();
    for (const axis of AXES) if (held[axis] === 0) taps[axis] = this.#taps[axis];
    const reading = { held, taps, turnYaw: this.#turnYaw, turnPitch: this.#turnPitch, inputAt: this.inputAt };
    this.#taps = zero();
    this.#turnYaw = this.#turnPitch = 0;
    this.inputAt = null;
    return reading;
  }

  #touch() {
    this.inputAt ??= performance.now();
    this.onchange();
  }
}
