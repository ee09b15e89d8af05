// SPDX-License-Identifier: Apache-2.0
// Gamepads in the standard layout: left stick moves, right stick looks, triggers go up and down, Start pauses.

const DEAD = 0.15;
const START_BUTTON = 9;
const [LEFT_TRIGGER, RIGHT_TRIGGER] = [6, 7];

const live = (value) => (Math.abs(value) < DEAD ? 0 : (value - Math.sign(value) * DEAD) / (1 - DEAD));

/** Returns a function to call once per picture. `onstart`: the Start button was pressed. */
export function attachGamepad(controls, onstart, onconnect) {
  let wasPressed = false;
  addEventListener("gamepadconnected", ({ gamepad }) => onconnect(gamepad.id));
  addEventListener("gamepaddisconnected", () => controls.steer("gamepad", null));
  return () => {
    const pad = navigator.getGamepads?.().find((item) => item?.connected && item.mapping === "standard");
    if (!pad) return;
    const [x, y, lookX, lookY] = pad.axes.map(live);
    const up = (pad.buttons[RIGHT_TRIGGER]?.value ?? 0) - (pad.buttons[LEFT_TRIGGER]?.value ?? 0);
    const idle = !x && !y && !lookX && !lookY && !up;
    controls.steer("gamepad", idle ? null : { forward: -y, right: x, up, yaw: lookX, pitch: -lookY });
    const pressed = pad.buttons[START_BUTTON]?.pressed ?? false;
    if (pressed && !wasPressed) onstart();
    wasPressed = pressed;
  };
}
