// SPDX-License-Identifier: Apache-2.0
// One WebSocket to the world camera door that comes back by itself. Gets a ticket before each attempt, waits longer after
// each failure, notices a silent peer. Goes to another server of the fleet when told to. Knows messages only as maps.
//
// Events: `up` {hello, again}, `message` {message}, `down` {reason, retryMs, code, givenUp} (givenUp: name of the server of
// a moved session that is tried no longer, null = none), `refused` {code, reason} (no more attempts).

import { decode, encode } from "./msgpack.js";

const SUBPROTOCOL = "omni.world.camera.v1";
const FIRST_RETRY_MS = 250;
const LAST_RETRY_MS = 8000;
const PING_MS = 5000;
const SILENCE_MS = 20000;
const GREETING_MS = 10000;
const LAST_FOLLOWED_FAILURE = 4;
const SILENT_TEXT = "the connection went silent";
const PING_TIMEOUT = "keepalive ping timeout"; // reason of uvicorn and websockets; the code is 1011, as for a dead engine

/** Close codes after which trying again at once would be wrong, and what to tell. */
const FINAL = {
  1003: "The server did not understand this page.",
  1008: "The server refused the connection.",
  4009: "This world was taken over from another page.",
};

/** The address of a path on this page's server, or on the one that a session has moved to. server: {name, url, session}. */
export function addressOf(path, server) {
  const { name = null, url = null, session = null } = server ?? {};
  const root = url === null ? new URL("..", document.baseURI) : new URL(url.replace(/\/*$/, "/"));
  const address = new URL(path, root);
  if (name !== null && url === null) address.search = new URLSearchParams({ server: name, session });
  return address;
}

export class Link extends EventTarget {
  hello = null;
  rttMs = null;
  #socket = null;
  #wanted = false;
  #failures = 0;
  #timers = new Set();
  #heardAt = 0;
  #askedAt = null; // when a ping was sent that nothing has followed yet
  #hasEngineError = false; // on this connection, and no frame has come since
  #askKey;
  #key = null;
  #server = null; // {name, url, session} of the server to connect to; null = the one of the page

  /** askKey(wasWrong): Promise of the API key, asked for when the server wants one. */
  constructor(askKey) {
    super();
    this.#askKey = askKey;
    document.addEventListener("visibilitychange", () => this.#retryNow());
    addEventListener("online", () => this.#retryNow());
  }

  /** Milliseconds for which the server has not answered; 0 = it has. */
  get silentMs() {
    return this.isUp && this.#askedAt !== null && !document.hidden ? performance.now() - this.#askedAt : 0;
  }

  /** The API key that the server has accepted; null = none is needed. */
  get key() {
    return this.#key;
  }

  get isUp() {
    return this.hello !== null && this.#socket?.readyState === WebSocket.OPEN;
  }

  open() {
    if (this.#wanted) return;
    this.#wanted = true;
    this.#failures = 0;
    this.#attempt();
  }

  /** Send a map, or bytes made earlier by `pack`. Returns whether there was a connection to send it on. */
  send(message) {
    if (!this.isUp) return false;
    this.#socket.send(message instanceof Uint8Array ? message : encode(message));
    return true;
  }

  static pack(message) {
    return encode(message);
  }

  /** Connect at once to the server of a session. url: null = this page's, where a proxy finds the server by its name. */
  follow(name, url, session) {
    this.#server = { name, url, session };
    this.#failures = 0;
    if (this.#socket) this.#lost(this.#socket, `the world moves to ${name}`, 0);
    else this.#retryNow();
  }

  /** Connect anew, as after a loss. */
  reconnect() {
    this.#wanted = true;
    if (this.#socket) this.#lost(this.#socket, "reconnecting", 0);
    else this.#retryNow();
  }

  async #attempt() {
    this.#clearTimers();
    let socket;
    try {
      const ticket = await this.#ticket();
      const url = addressOf("omni/ws/realtime/world/camera", this.#server);
      url.protocol = url.protocol.replace("http", "ws");
      socket = new WebSocket(url, ticket ? [SUBPROTOCOL, `ticket.${ticket}`] : [SUBPROTOCOL]);
    } catch (error) {
      this.#again(error.message);
      return;
    }
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => this.#hear(socket, data);
    socket.onclose = ({ code, reason }) => this.#closed(socket, code, reason);
    this.#after(GREETING_MS, () => this.#lost(socket, "the server does not answer"));
  }

  async #ticket() {
    for (let asked = false; ; asked = true) {
      const headers = this.#key === null ? {} : { Authorization: `Bearer ${this.#key}` };
      const answer = await fetch(addressOf("v1/omni/ticket", this.#server), {
        method: "POST",
        headers,
        cache: "no-store",
        signal: AbortSignal.timeout(GREETING_MS),
      }).catch(() => {
        throw new Error("the server cannot be reached");
      });
      if (answer.ok) return (await answer.json()).ticket ?? null;
      if (answer.status !== 401) throw new Error(`the server answers ${answer.status}`);
      this.#key = await this.#askKey(asked);
    }
  }

  #hear(socket, data) {
    if (socket !== this.#socket) return;
    this.#heardAt = performance.now();
    this.#askedAt = null;
    if (typeof data === "string") return;
    const message = decode(data);
    if (message.code === "engine_error") this.#hasEngineError = true;
    else if (message.type === "frame") this.#hasEngineError = false;
    if (this.hello === null && message.type === undefined) {
      this.#clearTimers();
      this.hello = message;
      const again = this.#failures > 0;
      this.#failures = 0;
      this.#after(PING_MS, () => this.#ping(socket));
      this.#tell("up", { hello: message, again });
    } else if (message.type === "pong") {
      this.rttMs = performance.now() - message.t;
    } else {
      this.#tell("message", { message });
    }
  }

  #ping(socket) {
    if (socket !== this.#socket) return;
    if (document.hidden) {
      this.#heardAt = performance.now(); // the browser may hold messages back
    } else if (performance.now() - this.#heardAt > SILENCE_MS) {
      this.#lost(socket, SILENT_TEXT);
      return;
    }
    this.#askedAt ??= performance.now();
    this.send({ endpoint: "ping", t: performance.now() }); // also keeps the session of a page that is idle
    this.#after(PING_MS, () => this.#ping(socket));
  }

  #closed(socket, code, reason) {
    if (socket !== this.#socket) return;
    if (code in FINAL) {
      this.#drop();
      this.#wanted = false;
      this.#tell("refused", { code, reason: FINAL[code], detail: reason });
    } else if (reason === PING_TIMEOUT && !this.#hasEngineError) {
      this.#lost(socket, SILENT_TEXT); // the server heard nothing, for instance because this machine slept
    } else {
      this.#lost(socket, reason || "the connection was lost", null, code);
    }
  }

  #lost(socket, reason, waitMs = null, code = null) {
    if (socket !== this.#socket) return;
    this.#drop();
    socket.close();
    if (this.#wanted) this.#again(reason, waitMs, code);
  }

  #drop() {
    this.#clearTimers();
    const socket = this.#socket;
    this.#socket = this.hello = this.rttMs = this.#askedAt = null;
    this.#hasEngineError = false;
    if (socket) socket.onclose = socket.onmessage = null;
  }

  #again(reason, waitMs = null, code = null) {
    let givenUp = null;
    if (this.#failures >= LAST_FOLLOWED_FAILURE && this.#server !== null) {
      givenUp = this.#server.name;
      this.#server = null; // the page's own server may know more
    }
    const ceiling = Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.#failures);
    const retryMs = waitMs ?? ceiling * (0.75 + Math.random() / 2);
    this.#failures += 1;
    this.#after(retryMs, () => this.#attempt());
    this.#tell("down", { reason, retryMs, code, givenUp });
  }

  /** The network or the visitor is back: do not sit out a long wait. */
  #retryNow() {
    if (this.#wanted && this.#socket === null && this.#timers.size > 0 && !document.hidden) this.#attempt();
  }

  #after(ms, run) {
    const timer = setTimeout(() => {
      this.#timers.delete(timer);
      run();
    }, ms);
    this.#timers.add(timer);
  }

  #clearTimers() {
    for (const timer of this.#timers) clearTimeout(timer);
    this.#timers.clear();
  }

  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
