// SPDX-License-Identifier: Apache-2.0
// A world over WebRTC: video by a track, held keys by a data channel. The messages are those of /v1/realtime/video.

import { keyDialog } from "./dialogs.js";
import { addressOf, Link } from "./link.js";
import { SAMPLES } from "./samples.js";

const SENT_QUALITY = 0.85; // of the start image, so that it fits into one message
const GATHERING_MS = 3000;

/** One connection. Events: `message` {message}, `track` {stream}, `closed` {reason}. */
export class Stream extends EventTarget {
  #connection = new RTCPeerConnection();
  #channel = this.#connection.createDataChannel("control");
  #count = 0;
  #isClosed = false;

  constructor() {
    super();
    this.#connection.addTransceiver("video", { direction: "recvonly" });
    this.#connection.ontrack = ({ streams, track }) => this.#tell("track", { stream: streams[0] ?? new MediaStream([track]) });
    this.#connection.onconnectionstatechange = () => {
      if (["failed", "closed"].includes(this.#connection.connectionState)) this.close("the connection was lost");
    };
    this.#channel.onmessage = ({ data }) => this.#hear(JSON.parse(data));
    this.#channel.onclose = () => this.close("the server closed the connection");
  }

  /** Connect and start a session. start: keys of `session.start`; key: the API key, null = none; server: `addressOf`. */
  async open(start, key, server = null) {
    await this.#connection.setLocalDescription();
    await this.#gathered();
    const headers = { "Content-Type": "application/sdp", ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
    const answer = await fetch(addressOf("v1/realtime/webrtc", server), { method: "POST", headers, body: this.#connection.localDescription.sdp });
    const text = await answer.text();
    if (!answer.ok) throw new Error(errorText(text) ?? `the server answers ${answer.status}`);
    await this.#connection.setRemoteDescription({ type: "answer", sdp: text });
    await new Promise((resolve, reject) => {
      if (this.#channel.readyState === "open") resolve();
      this.#channel.addEventListener("open", resolve, { once: true });
      this.addEventListener("closed", ({ detail }) => reject(new Error(detail.reason)), { once: true });
    });
    this.send({ type: "session.start", ...start });
  }

  send(message) {
    if (this.#channel.readyState === "open") this.#channel.send(JSON.stringify(message));
  }

  /** Hold these buttons from now on. */
  hold(buttons) {
    const actions = { mode: "state", transitions: [{ buttons }] };
    const event = { multi_modal_data: { actions } };
    this.send({ type: "session.interaction", interaction: { event_id: `keys-${++this.#count}`, event } });
  }

  close(reason) {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#connection.close();
    this.#tell("closed", { reason });
  }

  #hear(message) {
    this.#tell("message", { message });
    if (message.type === "session.closed") this.close(message.reason);
  }

  /** The server takes no candidates later. */
  #gathered() {
    return new Promise((resolve) => {
      const done = () => this.#connection.iceGatheringState === "complete" && resolve();
      this.#connection.addEventListener("icegatheringstatechange", done);
      setTimeout(resolve, GATHERING_MS);
      done();
    });
  }

  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

function errorText(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return null;
  }
}

/** How a session starts: at the world's first start image, or at a sample. Returns keys of `session.start`. */
async function firstKeys(hello) {
  const { prompt, image } = hello.actions;
  const first = hello.world?.starts?.[0];
  const text = first ? hello.world.prompts.find(({ name }) => name === first.prompt)?.text : SAMPLES[0].prompt;
  const [width, height] = hello.default_size;
  const start = { width, height, prompt: prompt === "none" ? "" : text };
  if (image === "none") return start;
  const url = await startImage(first ? `world/${first.file}` : SAMPLES[0].file, hello);
  return { ...start, image_reference: { image_url: url } };
}

/** An image as a `data:` URL of the stream's size. */
async function startImage(url, hello) {
  const picture = await createImageBitmap(await (await fetch(url)).blob());
  const [width, height] = hello.default_size;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  canvas.getContext("2d").drawImage(picture, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", SENT_QUALITY);
}

// ---- the page -----------------------------------------------------------------------------------------------------

const by = (id) => document.getElementById(id);
const held = new Set();
let stream = null;

const say = (state, text) => {
  document.body.dataset.link = state;
  by("status").textContent = text;
};

function start(link, hello) {
  const byCode = new Map(hello.actions.buttons.flatMap(({ name, codes }) => (codes ?? []).map((code) => [code, name])));
  by("model").textContent = hello.model;
  by("keys").textContent = `Keys: ${hello.actions.buttons.map(({ name }) => name).join(" ")}`;
  by("begin").disabled = false;
  say("up", "Ready");

  /** Play a session. keys: of `session.start`; server: the one that it has moved to. */
  async function play(keys, server = null) {
    const next = (stream = new Stream());
    const fail = (reason) => {
      if (stream !== next) return; // the session goes on in another stream
      stream = null;
      by("begin").disabled = false;
      say("down", reason);
    };
    next.addEventListener("track", ({ detail }) => (by("view").srcObject = detail.stream));
    next.addEventListener("closed", ({ detail }) => fail(detail.reason));
    next.addEventListener("message", ({ detail: { message } }) => {
      if (message.type === "error") say("up", message.message);
      if (message.type === "session.moved") follow(keys, message);
    });
    try {
      await next.open(keys, link.key, server);
      if (server !== null) next.hold([...held]); // they may have changed on the way
      say("up", "Playing");
    } catch (error) {
      next.close(error.message);
      fail(error.message);
    }
  }

  /** Go on with a session on the server that it has moved to. */
  function follow({ extra_params: extra, ...keys }, { server, url = null, session_id: session }) {
    play({ ...keys, extra_params: { ...extra, session_id: session } }, { name: server, url, session });
  }

  by("begin").onclick = async () => {
    by("begin").disabled = true;
    try {
      await play({ ...(await firstKeys(hello)), extra_params: { follow_moves: true } });
    } catch (error) {
      by("begin").disabled = false;
      say("down", error.message);
    }
  };

  by("view").onresize = ({ target }) => target.style.setProperty("--ratio", target.videoWidth / target.videoHeight);

  const change = (code, isDown) => {
    if (!byCode.has(code) || held.has(byCode.get(code)) === isDown) return;
    held[isDown ? "add" : "delete"](byCode.get(code));
    stream?.hold([...held]);
  };
  addEventListener("keydown", ({ code, repeat }) => repeat || change(code, true));
  addEventListener("keyup", ({ code }) => change(code, false));
  addEventListener("pagehide", () => stream?.close("the page was left")); // otherwise the server waits for half a minute
  addEventListener("blur", () => {
    if (held.size === 0) return;
    held.clear();
    stream?.hold([]);
  });
}

if (by("begin")) {
  const link = new Link(keyDialog());
  let isStarted = false;
  link.addEventListener("up", ({ detail: { hello } }) => {
    if (isStarted) return;
    isStarted = true;
    start(link, hello);
  });
  link.addEventListener("down", ({ detail }) => isStarted || say("down", detail.reason));
  link.open();
}
