// SPDX-License-Identifier: Apache-2.0
// The page's entry: finds the elements, connects buttons and devices to the app, shows its state.

import { App } from "./app.js";
import { keyDialog } from "./dialogs.js";
import { Controls } from "./input/controls.js";
import { Game } from "./input/game.js";
import { fillPanel, helpRows } from "./input/game_panel.js";
import { attachGamepad } from "./input/gamepad.js";
import { attachKeyboard, walkingKeys } from "./input/keyboard.js";
import { attachMouse, lookingMouse } from "./input/mouse.js";
import { attachStick } from "./input/stick.js";
import { Link } from "./link.js";
import { markPrompt, promptButtons } from "./offer.js";
import { attachStage } from "./stage.js";
import { StartPanel } from "./start.js";
import { showStats } from "./stats.js";

const STATS_EVERY_MS = 250;

const by = (id) => document.getElementById(id);
const controls = new Controls();
const game = new Game();
const link = new Link(keyDialog());
const app = new App(
  link,
  controls,
  game,
  { view: by("view"), map: by("map"), notices: by("notices"), live: by("live"), marks: by("marks") },
  () => show(),
);
const start = new StartPanel(
  by("start"),
  (choice) => {
    app.begin(choice);
    toWorld();
  },
  (text) => app.notices.show(text, { isBad: true }),
);

// ---- connection ---------------------------------------------------------------------------------------------------

let status = ["connecting", "Connecting …"];

link.addEventListener("up", ({ detail: { hello } }) => {
  status = ["up", "Connected"];
  by("model").textContent = hello.preset ? `${hello.model} · preset ${hello.preset}` : hello.model;
  configure(hello.actions);
  controls.rises = !hello.world?.has_walls; // who is stopped by walls stays on the ground
  document.body.dataset.ground = controls.rises ? "open" : "walls";
  start.configure(hello);
  app.map.setWorld(hello.world);
  promptButtons(by("prompts"), hello.world?.prompts ?? [], ({ text }) => app.isLive && app.setPrompt(text));
  app.player.fps = hello.fps;
  app.chooseFormat();
  show();
});
link.addEventListener("down", ({ detail }) => {
  status = ["down", `Reconnecting: ${detail.reason}`];
  app.interrupted(detail);
  show();
});
link.addEventListener("refused", ({ detail: { reason, detail } }) => {
  status = ["refused", reason];
  const text = detail ? `${reason} (${detail})` : reason;
  app.notices.show(text, { isBad: true, action: { label: "Connect again", run: () => link.reconnect() } });
  show();
});

let spaceText = "";
let showPressed = () => {};

/** Show what this world takes, and just that. */
function configure(space) {
  if (JSON.stringify(space) === spaceText) return; // a connection that is back changes nothing
  spaceText = JSON.stringify(space);
  game.configure(space);
  const { dataset } = document.body;
  dataset.steering = app.isWalk ? "walk" : "play";
  dataset.mouse = game.hasMouse ? "look" : "none";
  [dataset.prompt, dataset.image] = [space.prompt, space.image];
  showPressed = app.isWalk ? () => {} : fillPanel(by("actions"), game);
  by("help-actions").replaceChildren(...(app.isWalk ? [] : helpRows(space).map(helpRow)));
}

function helpRow([keys, title]) {
  const row = document.createElement("tr");
  const names = Object.assign(document.createElement("th"), { scope: "row" });
  names.append(...keys.flatMap((key) => [Object.assign(document.createElement("kbd"), { textContent: key }), " "]));
  row.append(names, Object.assign(document.createElement("td"), { textContent: title }));
  return row;
}

const isPlay = () => document.body.dataset.steering === "play";

// ---- buttons ------------------------------------------------------------------------------------------------------

const mouse = lookingMouse(controls);
const lockPointer = attachMouse(by("view"), () => (isPlay() ? game : mouse), () => app.isLive && !app.isPaused, (isLocked) => {
  by("look").setAttribute("aria-pressed", isLocked);
});

const commands = {
  pause: () => app.pause(),
  restart: () => app.restart(),
  mark: () => app.mark(),
  record: () => app.record(),
  picture: () => app.savePicture(),
  look: () => document.body.dataset.mouse === "look" && lockPointer(),
  full: () => (document.fullscreenElement ? document.exitFullscreen() : document.querySelector(".stage-column").requestFullscreen?.()),
  leave: () => {
    app.leave();
    start.isShown = true;
  },
  settings: () => {
    const isShown = document.body.dataset.panel !== "shown";
    document.body.dataset.panel = isShown ? "shown" : "";
    by("settings").setAttribute("aria-pressed", isShown);
  },
  help: () => by("help-dialog").showModal(),
  overlay: () => (by("hud").open = !by("hud").open),
};
by("hud").addEventListener("toggle", () => by("overlay").setAttribute("aria-pressed", by("hud").open));
for (const [id, run] of Object.entries(commands)) by(id).addEventListener("click", run);

const keys = walkingKeys(controls);
attachKeyboard(
  () => (isPlay() ? game : keys),
  {
    Space: commands.pause,
    KeyR: commands.restart,
    KeyB: commands.mark,
    KeyV: commands.record,
    KeyP: commands.picture,
    KeyM: commands.look,
    KeyF: commands.full,
    KeyO: commands.overlay,
    KeyH: commands.help,
  },
  () => app.isLive && !document.querySelector("dialog[open]"),
);
attachStick(by("stick-move"), (x, y) =>
  isPlay() ? game.walkStick("touch", x ?? 0, y ?? 0) : controls.steer("move", x === null ? null : { right: x, forward: y }),
);
attachStick(by("stick-look"), (x, y) =>
  isPlay() ? game.lookStick("touch", x ?? 0, y ?? 0) : controls.steer("look", x === null ? null : { yaw: x, pitch: y }),
);
const pollGamepad = attachGamepad(controls, () => (isPlay() ? game : null), commands.pause, (name) => app.notices.show(`Gamepad: ${name}`));

by("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = by("prompt").value.trim();
  if (text && app.isLive) app.setPrompt(text);
  toWorld();
});
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    by("prompt-form").requestSubmit();
  }
});

const sliders = {
  speed: (value) => (app.speed = value),
  turn: (value) => (app.turnSpeed = game.sensitivity = value),
  margin: (value) => (app.pacer.marginMs = value),
};
for (const [id, set] of Object.entries(sliders)) {
  const slider = by(id);
  const update = () => {
    set(Number(slider.value));
    by(`${id}-value`).textContent = id === "margin" ? `${slider.value} ms` : `${Number(slider.value).toFixed(2)}×`;
  };
  slider.addEventListener("input", update);
  update();
}

// After a click on any control the keyboard is the world's again; whoever tabs to a control stays there.
document.addEventListener("click", ({ target, detail }) => detail > 0 && target.closest?.("button, summary") && toWorld());
document.addEventListener("pointerup", ({ target }) => target.matches?.("input[type=range]") && setTimeout(toWorld));
for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("close", toWorld);

function toWorld() {
  if (app.isLive && !document.querySelector("dialog[open]")) by("stage").focus({ preventScroll: true });
}

// ---- showing ------------------------------------------------------------------------------------------------------

let lastPrompt = null;

function show() {
  const [kind, text] = status;
  document.body.dataset.link = kind;
  by("status").textContent = app.isLive ? worldStatus(kind, text) : text;
  document.body.dataset.world = app.isLost || app.hasEngineFailed || app.isStopped ? "bad" : "good";
  document.body.dataset.live = app.isLive;
  start.isShown !== !app.isLive && (start.isShown = !app.isLive);
  for (const id of ["pause", "restart", "mark", "record", "picture", "look", "leave", "apply"]) by(id).disabled = !app.isLive;
  setToggle("pause", app.isPaused, app.isPaused ? "Resume" : "Pause");
  setToggle("record", app.recorder.isOn, app.recorder.isClosing ? "Saving …" : app.recorder.isOn ? "Stop and save" : "Record");
  by("stage").classList.toggle("is-dimmed", app.isLive && (kind !== "up" || app.isStalled));
  document.body.dataset.place = app.isPlaced ? "known" : "unknown";
  if (lastPrompt !== app.prompt && document.activeElement !== by("prompt")) by("prompt").value = app.prompt;
  lastPrompt = app.prompt;
  markPrompt(by("prompts"), app.prompt);
  by("prompt-state").textContent =
    app.promptState === "queued" ? "Queued for the next chunk …" : app.appliedFrame ? `Holds from frame ${app.appliedFrame}.` : "";
}

function worldStatus(kind, text) {
  if (app.isLost) return "This world is lost";
  if (app.hasEngineFailed) return "The engine has stopped";
  if (kind !== "up") return text;
  if (app.isStopped) return "Stopped by an error";
  if (app.isStalled) return "No picture comes from the server";
  return app.isPaused ? "Paused" : "Live";
}

function setToggle(id, isOn, label) {
  const button = by(id);
  button.setAttribute("aria-pressed", isOn);
  const text = button.querySelector(".label");
  if (text.textContent !== label) text.textContent = label;
}

function showHeld() {
  const { held } = controls;
  for (const key of document.querySelectorAll("#keys [data-axis]")) {
    const isHeld = held[key.dataset.axis] * Number(key.dataset.sign) > 0.1;
    key.classList.toggle("is-held", isHeld);
    if (isHeld) key.parentElement.classList.add("is-known"); // from now on only what is held is shown
  }
}

let statsShown = 0;
function tick(now) {
  pollGamepad();
  app.tick(now);
  if (now - statsShown > STATS_EVERY_MS) {
    statsShown = now;
    showStats(by("hud"), app.stats, { player: app.player, pacer: app.pacer, link, numPending: app.world.numPending, codec: app.codec });
    by("map-text").textContent = app.map.describe();
    by("record-time").textContent = app.recorder.isOn ? `${(app.recorder.numFrames / app.player.fps).toFixed(1)} s` : "";
  }
  requestAnimationFrame(tick);
}

controls.onchange = showHeld;
game.onchange = () => showPressed();
document.addEventListener("visibilitychange", () => app.steady()); // a hidden page shows nothing
attachStage(by("stage"), by("frame"), by("view"));
link.open();
show();
requestAnimationFrame(tick);

/** For the console and for tests: the parts of this page. */
export const parts = { app, link, controls, game };
