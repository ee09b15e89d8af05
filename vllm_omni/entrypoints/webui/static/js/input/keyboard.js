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

/** Move by keys; `commands`: key code -> function, called once per press. `isOn()`: whether keys count now. */
export function attachKeyboard(controls, commands, isOn) {
  addEventListener("keydown", (event) => {
    if (!isOn() || event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.(TYPES_TEXT)) return;
    if (event.code.startsWith("Arrow") && event.target.matches?.(USES_ARROWS)) return;
    if (event.code in MOVES) {
      event.preventDefault();
      if (!event.repeat) controls.press(event.code, ...MOVES[event.code]);
    } else if (event.code in commands && !event.shiftKey) {
      if (["Space", "Enter"].includes(event.code) && event.target.closest?.("button, a, summary, label, input")) return;
      event.preventDefault();
      if (!event.repeat) commands[event.code]();
    }
  });
  addEventListener("keyup", ({ code }) => controls.release(code));
  addEventListener("blur", () => controls.releaseAll());
  document.addEventListener("visibilitychange", () => document.hidden && controls.releaseAll());
  addEventListener("focusin", ({ target }) => target.matches?.(TYPES_TEXT) && controls.releaseAll());
}
