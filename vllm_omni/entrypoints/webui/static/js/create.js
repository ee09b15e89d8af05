// SPDX-License-Identifier: Apache-2.0
// The page of servers that serve no world: a prompt, and the image, video or answer that comes of it. Everything goes
// through the OpenAI routes of this server, which say what is wrong in their own words.

import { keyDialog } from "./dialogs.js";

const POLL_MS = 500;
const by = (id) => document.getElementById(id);
const { prompt, file, size, seed, go } = by("form").elements;
const askKey = keyDialog();
let key = null;
let mode = null;

/** What can be done, by its name: when it is offered, how its button reads, whether it needs an image, and the doing. */
const MODES = {
  make: { label: "Image", isOffered: ({ tasks }) => tasks.includes("text_to_image"), run: makeImage },
  edit: { label: "Edit an image", isOffered: ({ tasks }) => tasks.includes("image_edit"), needsFile: true, run: editImage },
  film: { label: "Video", isOffered: ({ tasks }) => tasks.some((task) => task.endsWith("_to_video")), run: makeVideo },
  ask: { label: "Ask about an image", isOffered: ({ reads }) => reads.includes("image"), needsFile: true, run: ask },
};

/** Call a route of this server; asks for the key when one is wanted. Throws an Error with the server's words. */
async function call(path, options = {}) {
  for (let asked = false; ; asked = true) {
    const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
    const answer = await fetch(new URL(`../v1/${path}`, document.baseURI), { ...options, headers });
    if (answer.ok) return answer;
    if (answer.status !== 401) throw new Error((await words(answer)) ?? `The server answers ${answer.status}.`);
    key = await askKey(asked);
  }
}

async function words(answer) {
  const body = await answer.json().catch(() => null);
  return body?.error?.message;
}

const json = (value) => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) });

/** The fields that were filled in. */
const given = () => ({
  prompt: prompt.value.trim(),
  ...(size.value.trim() ? { size: size.value.trim() } : {}),
  ...(seed.value === "" ? {} : { seed: Number(seed.value) }),
});

function form(fields, name) {
  const data = new FormData();
  for (const [field, value] of Object.entries(fields)) data.append(field, value);
  if (file.files[0]) data.append(name, file.files[0]);
  return { method: "POST", body: data };
}

async function makeImage() {
  return images(await (await call("images/generations", json({ ...given(), response_format: "b64_json" }))).json());
}

async function editImage() {
  return images(await (await call("images/edits", form({ ...given(), response_format: "b64_json" }, "image"))).json());
}

function images({ data, output_format: format, seed: drawn, size: made }) {
  const shown = data.map(({ b64_json: text }) => Object.assign(document.createElement("img"), { alt: "", src: `data:image/${format};base64,${text}` }));
  return [...shown, note(`${made} · seed ${drawn}`)];
}

async function makeVideo(progress) {
  let job = await (await call("videos", file.files[0] ? form(given(), "input_reference") : json(given()))).json();
  while (job.status === "queued" || job.status === "in_progress") {
    progress(`${job.status === "queued" ? "Waiting" : "Making"} … ${job.progress} %`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    job = await (await call(`videos/${job.id}`)).json();
  }
  if (job.status !== "completed") throw new Error(job.error?.message ?? "The video was not made.");
  const blob = await (await call(`videos/${job.id}/content`)).blob();
  const video = Object.assign(document.createElement("video"), { controls: true, loop: true, muted: true, src: URL.createObjectURL(blob) });
  return [video, note(`${job.size} · ${job.seconds} s · seed ${job.seed}`)];
}

async function ask() {
  const reader = new FileReader();
  const url = await new Promise((resolve) => {
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(file.files[0]);
  });
  const content = [
    { type: "image_url", image_url: { url } },
    { type: "text", text: prompt.value.trim() },
  ];
  const { choices } = await (await call("chat/completions", json({ messages: [{ role: "user", content }] }))).json();
  return [Object.assign(document.createElement("p"), { textContent: choices[0].message.content })];
}

const note = (text) => Object.assign(document.createElement("p"), { className: "hint", textContent: text });

function choose(name) {
  mode = name;
  document.body.dataset.mode = name;
  file.required = MODES[name].needsFile ?? false;
  by("file-label").textContent = file.required ? "Image" : "Start image (if the model takes one)";
  for (const button of by("modes").children) button.setAttribute("aria-pressed", button.dataset.name === name);
}

function say(kind, text) {
  document.body.dataset.link = kind;
  by("status").textContent = text;
}

function complain(text) {
  by("wrong").textContent = text;
  by("wrong").hidden = text === "";
}

by("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const asked = prompt.value.trim();
  go.disabled = true;
  complain("");
  say("up", "Working …");
  try {
    const parts = await MODES[mode].run((text) => say("up", text));
    const item = document.createElement("li");
    item.append(note(asked), ...parts);
    by("results").prepend(item);
  } catch (error) {
    complain(error.message);
  } finally {
    go.disabled = false;
    say("up", "Ready");
  }
});

try {
  const served = await (await call("omni/served")).json();
  by("model").textContent = served.model;
  const offered = Object.entries(MODES).filter(([, { isOffered }]) => isOffered(served));
  by("modes").replaceChildren(
    ...offered.map(([name, { label }]) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: label });
      button.dataset.name = name;
      button.addEventListener("click", () => choose(name));
      return button;
    }),
  );
  if (offered.length === 0) throw new Error("This model makes nothing that the page can show.");
  choose(offered[0][0]);
  go.disabled = false;
  say("up", "Ready");
} catch (error) {
  complain(error.message);
  say("refused", "Not available");
}
