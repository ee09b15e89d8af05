// SPDX-License-Identifier: Apache-2.0
// Keys by their place on the keyboard, not their letter. Ignored while something is being typed; released on blur.

export const MOVES = {
  KeyW: ["forward", 1],
  KeyS: ["forward", -1],
  KeyD: ["right", 1],
  KeyA: ["right", -1],
  KeyE: ["up", 1],
  KeyQ: ["up", -1],
  KeyL: ["yaw", 1],
  KeyJ: ["yaw", -1],
  KeyI: ["pitch", 1],
  KeyK: ["pitch", -1],
  ArrowRight: ["yaw", 1],
  ArrowLeft: ["yaw", -1],
  ArrowUp: ["pitch", 1],
  ArrowDown: ["pitch", -1],
};

const TYPES_TEXT = "input:not([type=range],[type=checkbox],[type=radio],[type=button]), textarea, select, [contenteditable]";
const USES_ARROWS = "input[type=range], input[type=radio], [role=listbox]";

/** The keys that walk and look with `controls`, as a device for `attachKeyboard`. */
export const walkingKeys = (controls) => ({
  takes: (code) => code in MOVES && (MOVES[code][0] !== "up" || controls.rises),
  press: (code) => controls.press(code, ...MOVES[code]),
  release: (code) => controls.release(code),
  releaseAll: () => controls.releaseAll(),
});

/**
 * `device()`: what the keys steer now, {takes(code), press(code), release(code), releaseAll()}; `commands`: key code ->
 * function, called once per press, unless the device takes that key. `isOn()`: whether keys count now.
 */
export function attachKeyboard(device, commands, isOn) {
  addEventListener("keydown", (event) => {
    if (!isOn() || event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.(TYPES_TEXT)) return;
    if (event.code.startsWith("Arrow") && event.target.matches?.(USES_ARROWS)) return;
    if (["Space", "Enter"].includes(event.code) && event.target.closest?.("button, a, summary, label, input")) return;
    if (device().takes(event.code)) {
      event.preventDefault();
      if (!event.repeat) device().press(event.code);
    } else if (event.code in commands && !event.shiftKey) {
      event.preventDefault();
      if (!event.repeat) commands[event.code]();
    }
  });
  addEventListener("keyup", ({ code }) => device().release(code));
  addEventListener("blur", () => device().releaseAll());
  document.addEventListener("visibilitychange", () => document.hidden && device().releaseAll());
  addEventListener("focusin", ({ target }) => target.matches?.(TYPES_TEXT) && device().releaseAll());
}
