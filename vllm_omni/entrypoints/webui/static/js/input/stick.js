// SPDX-License-Identifier: Apache-2.0
// An on-screen stick for touch (and mouse): how far the knob is from the middle, in two axes.

const DEAD = 0.12;

/** `steer(x, y)`: the knob is there, right and up in [-1, 1]; null, null when it was let go. */
export function attachStick(element, steer) {
  const knob = element.querySelector(".knob");
  let pointer = null;

  const move = (event) => {
    const box = element.getBoundingClientRect();
    const radius = box.width / 2;
    let x = (event.clientX - box.left - radius) / radius;
    let y = (event.clientY - box.top - radius) / radius;
    const length = Math.hypot(x, y);
    if (length > 1) [x, y] = [x / length, y / length];
    knob.style.transform = `translate(${x * radius * 0.6}px, ${y * radius * 0.6}px)`;
    const strength = Math.min(1, Math.max(0, (Math.min(1, length) - DEAD) / (1 - DEAD)));
    const scale = length > 0 ? strength / Math.min(1, length) : 0;
    steer(x * scale, -y * scale);
  };
  const drop = (event) => {
    if (event.pointerId !== pointer) return;
    pointer = null;
    knob.style.transform = "";
    element.classList.remove("is-held");
    steer(null, null);
  };
  element.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    pointer = event.pointerId;
    element.setPointerCapture(pointer);
    element.classList.add("is-held");
    move(event);
  });
  element.addEventListener("pointermove", (event) => event.pointerId === pointer && move(event));
  element.addEventListener("pointerup", drop);
  element.addEventListener("pointercancel", drop);
}
