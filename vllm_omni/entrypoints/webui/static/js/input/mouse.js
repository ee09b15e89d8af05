// SPDX-License-Identifier: Apache-2.0
// Looking around with the mouse: drag on the view, or lock the pointer to it and just move. Touch on the view drags too.

const RADIANS_PER_PIXEL = 0.0022;
const LARGEST_PIXELS = 200; // some browsers report a jump when the pointer is locked

/** `isOn()`: whether looking counts now; `onlock(isLocked)`. Returns a function that locks or frees the pointer. */
export function attachMouse(view, controls, isOn, onlock) {
  let dragging = null;
  let [lastX, lastY] = [0, 0];

  const look = (dx, dy) => {
    if (!isOn() || Math.abs(dx) > LARGEST_PIXELS || Math.abs(dy) > LARGEST_PIXELS) return;
    controls.turn(dx * RADIANS_PER_PIXEL, -dy * RADIANS_PER_PIXEL);
  };

  view.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || document.pointerLockElement) return;
    dragging = event.pointerId;
    [lastX, lastY] = [event.clientX, event.clientY];
    view.setPointerCapture(event.pointerId);
    view.classList.add("is-dragging");
  });
  view.addEventListener("pointermove", (event) => {
    if (document.pointerLockElement === view) {
      look(event.movementX, event.movementY);
    } else if (event.pointerId === dragging) {
      // A dragged picture follows the hand: to the left means looking to the right.
      look(lastX - event.clientX, lastY - event.clientY);
      [lastX, lastY] = [event.clientX, event.clientY];
    }
  });
  const drop = () => {
    dragging = null;
    view.classList.remove("is-dragging");
  };
  view.addEventListener("pointerup", drop);
  view.addEventListener("pointercancel", drop);
  document.addEventListener("pointerlockchange", () => onlock(document.pointerLockElement === view));

  return () => {
    if (document.pointerLockElement) document.exitPointerLock();
    else view.requestPointerLock?.()?.catch?.(() => {}); // refused: dragging works all the same
  };
}
