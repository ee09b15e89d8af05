// SPDX-License-Identifier: Apache-2.0
// The controls of a world of buttons and axes on the page: a button for each, with its key and what it does, and a
// slider for each axis that no mouse moves. They are held with a finger or the mouse as keys are.

const KEY_NAMES = { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→", Mouse0: "mouse left", Mouse1: "mouse middle", Mouse2: "mouse right" };

/** What a key is called: `KeyW` is W. */
export const keyName = (code) => KEY_NAMES[code] ?? code.replace(/^(Key|Digit)/, "");

/** Fill `box` with the controls of `game`'s space. Returns a function that shows which are held. */
export function fillPanel(box, game) {
  const buttons = game.buttons.map((button) => holdButton(button, game));
  const sliders = game.space.axes.filter(({ mouse, low, high }) => !mouse && high - low < 1e6).map((axis) => axisSlider(axis, game));
  box.replaceChildren(...buttons, ...sliders);
  return () => {
    const held = new Set(game.held);
    for (const element of buttons) element.setAttribute("aria-pressed", held.has(element.dataset.button));
  };
}

/** Rows of the help: [keys, title]. */
export function helpRows({ buttons, axes, scroll }) {
  const mouse = axes.filter((axis) => axis.mouse).map(({ title }) => title);
  return [
    ...buttons.filter(({ codes }) => codes?.length).map(({ title, codes }) => [codes.map(keyName), title]),
    ...(mouse.length > 0 ? [[["Mouse"], `${mouse.join(", ")}: drag on the picture, or M and just move (Esc ends it)`]] : []),
    ...(scroll ? [[["Wheel"], "scroll"]] : []),
  ];
}

function holdButton({ name, title, codes }, game) {
  const element = Object.assign(document.createElement("button"), { type: "button", title });
  const label = Object.assign(document.createElement("span"), { textContent: title });
  const keys = codes.slice(0, 2).map((code) => Object.assign(document.createElement("kbd"), { textContent: keyName(code) }));
  element.append(...keys, label);
  element.dataset.button = name;
  element.setAttribute("aria-pressed", false);
  element.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    element.setPointerCapture(event.pointerId);
    game.hold(element, name);
  });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) element.addEventListener(kind, () => game.letGo(element));
  element.addEventListener("contextmenu", (event) => event.preventDefault()); // a long touch
  return element;
}

function axisSlider({ name, title, low, high }, game) {
  const label = Object.assign(document.createElement("label"), { textContent: `${title} ` });
  const start = Math.min(high, Math.max(low, 0));
  const input = Object.assign(document.createElement("input"), { type: "range", min: low, max: high, step: (high - low) / 100, value: start });
  input.dataset.axis = name;
  input.addEventListener("input", () => game.set(name, Number(input.value)));
  input.addEventListener("dblclick", () => {
    input.value = start;
    game.set(name, start);
  });
  label.append(input);
  return label;
}
