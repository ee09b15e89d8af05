// SPDX-License-Identifier: Apache-2.0
// Looking around with the mouse: drag on the view, or lock the pointer to it and just move. Touch on the view drags too.

const DEGREES_PER_PIXEL = 0.126;
const LINES_PER_NOTCH = 3;
const PIXELS_PER_NOTCH = 100;
const LARGEST_PIXELS = 200; // some browsers report a jump when the pointer is locked

/** Looking around with `controls`, as a device for `attachMouse`. */
export const lookingMouse = (controls) => ({ look: (dx, dy) => controls.turn(dx * DEGREES_PER_PIXEL, -dy * DEGREES_PER_PIXEL) });

/**
 * `device()`: what the mouse steers now, {look(dx, dy)} and, if it has them, press(code), release(code) for the buttons
 * of a locked pointer and scroll(notches). `isOn()`: whether it counts now; `onlock(isLocked)`. Returns a function that
 * locks or frees the pointer.
 */
export function attachMouse(view, device, isOn, onlock) {
  let dragging = null;
  let [lastX, lastY] = [0, 0];
  let turned = 0; // notches of the wheel that are not whole yet

  const look = (dx, dy) => {
    if (!isOn() || Math.abs(dx) > LARGEST_PIXELS || Math.abs(dy) > LARGEST_PIXELS) return;
    device().look(dx, dy);
  };

  view.addEventListener("pointerdown", (event) => {
    if (document.pointerLockElement === view) {
      if (isOn()) device().press?.(`Mouse${event.button}`);
      return;
    }
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
  view.addEventListener("pointerup", ({ button }) => device().release?.(`Mouse${button}`));
  view.addEventListener(
    "wheel",
    (event) => {
      if (!isOn() || !device().scrolls) return;
      event.preventDefault();
      // A wheel's notch is some 100 pixels or 3 lines; a touchpad's motion counts when it has gone as far.
      turned += event.deltaMode === WheelEvent.DOM_DELTA_LINE ? event.deltaY / LINES_PER_NOTCH : event.deltaY / PIXELS_PER_NOTCH;
      const notches = Math.trunc(turned);
      turned -= notches;
      if (notches !== 0) device().scroll(-notches);
    },
    { passive: false },
  );
  view.addEventListener("pointercancel", drop);
  document.addEventListener("pointerlockchange", () => onlock(document.pointerLockElement === view));

  return () => {
    if (document.pointerLockElement) document.exitPointerLock();
    else view.requestPointerLock?.()?.catch?.(() => {}); // refused: dragging works all the same
  };
}
