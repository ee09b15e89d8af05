// SPDX-License-Identifier: Apache-2.0
// Gamepads in the standard layout: left stick moves, right stick looks, triggers go up and down, Start pauses. In a world
// of buttons, the face and shoulder buttons are those that are no way to go.

const DEAD = 0.15;
const START_BUTTON = 9;
const [LEFT_TRIGGER, RIGHT_TRIGGER] = [6, 7];

const live = (value) => (Math.abs(value) < DEAD ? 0 : (value - Math.sign(value) * DEAD) / (1 - DEAD));

/** `game()`: the world of buttons that is played now, or null. Returns a function to call once per picture. `onstart`: the Start button was pressed. */
export function attachGamepad(controls, game, onstart, onconnect) {
  let wasPressed = false;
  addEventListener("gamepadconnected", ({ gamepad }) => onconnect(gamepad.id));
  addEventListener("gamepaddisconnected", () => (game() ? game().releaseAll() : controls.steer("gamepad", null)));
  return () => {
    const pad = navigator.getGamepads?.().find((item) => item?.connected && item.mapping === "standard");
    if (!pad) return;
    const [x, y, lookX, lookY] = pad.axes.map(live);
    if (game()) play(game(), pad, [x, y, lookX, lookY]);
    const up = (pad.buttons[RIGHT_TRIGGER]?.value ?? 0) - (pad.buttons[LEFT_TRIGGER]?.value ?? 0);
    const idle = !x && !y && !lookX && !lookY && !up;
    if (!game()) controls.steer("gamepad", idle ? null : { forward: -y, right: x, up, yaw: lookX, pitch: -lookY });
    const pressed = pad.buttons[START_BUTTON]?.pressed ?? false;
    if (pressed && !wasPressed) onstart();
    wasPressed = pressed;
  };
}

function play(game, pad, [x, y, lookX, lookY]) {
  game.walkStick("gamepad", x, -y);
  game.lookStick("gamepad", lookX, -lookY);
  game.extras.slice(0, START_BUTTON - 1).forEach(({ name }, index) => {
    if (pad.buttons[index]?.pressed) game.hold(`gamepad ${index}`, name);
    else game.letGo(`gamepad ${index}`);
  });
}
