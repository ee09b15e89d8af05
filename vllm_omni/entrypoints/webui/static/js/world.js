// SPDX-License-Identifier: Apache-2.0
// One visitor's world on the server: its session, the requests under way, marks to come back to, and what to do when the
// connection is back. Ids of sessions are always the server's. Knows no pictures and no devices.
//
// Invariants: a chunk is told once, in order; a request is kept until it is answered, so that it can be sent again as it
// was (the server does not make it twice); frames of requests that were dropped are dropped.
//
// Events: `frames` {message, request} (of a chunk, which may come in several messages), `chunk` {message, request} after
// its last one, `applied` {prompt, frame}, `trouble` {text, code, lost}, `resumed` {}, `rewound` {}
// (before `resumed`: the world is some chunks younger than what was seen of it).

import { Link } from "./link.js";

const MAX_LOOKUPS = 4; // several API server processes: a session is known to one of them, another attempt may reach it
const RETRY_MS = 500;
const MAX_GIVEN_UP = 2; // in one outage: a server that has failed twice is not followed again, or the page would never end

export class World extends EventTarget {
  sessionId = null;
  lastChunk = -1;
  isHeld = false; // no further requests: a mark is being set, or the connection is being resumed
  #link;
  format = "jpeg"; // of the frames: jpeg, h264
  #nextFrame = 0; // frames before it have been told
  #pending = new Map();
  #waiting = null; // {requestId, resolve, reject} of `branch`
  #resumeId = null;
  #replaying = 0;
  #lookups = 0;
  #givenUp = new Map(); // server -> times that the link has given it up since this world was last live
  #isOutOfReach = false; // on a server that does not answer
  #count = 0;
  #notBefore = 0;

  constructor(link) {
    super();
    this.#link = link;
    link.addEventListener("message", ({ detail }) => this.#take(detail.message));
    link.addEventListener("up", ({ detail }) => this.#greet(detail.hello));
    link.addEventListener("down", ({ detail: { givenUp = null } }) => {
      if (givenUp !== null) this.#givenUp.set(givenUp, (this.#givenUp.get(givenUp) ?? 0) + 1);
      this.#interrupt();
    });
    link.addEventListener("refused", () => this.#interrupt());
  }

  get hasBegun() {
    return this.lastChunk >= 0;
  }

  get numPending() {
    return this.#pending.size;
  }

  /** When the oldest request that is not answered was sent; null = none is under way. */
  get waitingSince() {
    const times = [...this.#pending.values()].map(({ sentAt }) => sentAt);
    return times.length > 0 ? Math.min(...times) : null;
  }

  get canAsk() {
    return this.sessionId !== null && this.#link.isUp && !this.isHeld && performance.now() >= this.#notBefore;
  }

  /** Begin afresh: the next request carries the start image. */
  begin() {
    // this server answers `moved` to any message for a session that has moved away, also to `reset`
    if (this.sessionId !== null && !this.#isOutOfReach && (this.hasBegun || this.#pending.size > 0)) {
      this.#link.send({ endpoint: "reset", session_id: this.sessionId, protocol_version: 1 });
    } else {
      this.sessionId = this.#link.hello.session_id;
    }
    this.#pending.clear();
    this.#givenUp.clear();
    this.lastChunk = -1;
    this.#nextFrame = 0;
    this.isHeld = this.#isOutOfReach = false;
  }

  /**
   * Ask for one chunk. steering: {cameras} or {actions} as the door takes them; extra: further keys of the message;
   * extraBody: of its extra_body; note: kept with the request for whoever hears of its chunk.
   */
  ask({ steering, extra = {}, extraBody = {}, note = {} }) {
    const requestId = `${this.sessionId.slice(0, 24)}-${++this.#count}-${randomText()}`;
    const bytes = Link.pack({
      endpoint: "infer",
      protocol_version: 1,
      session_id: this.sessionId,
      request_id: requestId,
      ...steering,
      extra_body: { video_format: this.format, ...extraBody },
      ...extra,
    });
    this.#pending.set(requestId, { requestId, bytes, note, sentAt: performance.now() });
    this.#link.send(bytes);
  }

  /**
   * Copy the world as it is now. Resolves to {sessionId, nextChunk} of the copy. `from`: another session's id.
   * isDisposable: the server may close the copy to make room.
   */
  branch(from = this.sessionId, isDisposable = false) {
    if (this.#waiting) return Promise.reject(new Error("one thing at a time"));
    return new Promise((resolve, reject) => {
      const requestId = `branch-${randomText()}`;
      this.#waiting = { requestId, resolve, reject };
      const message = { endpoint: "branch", request_id: requestId, session_id: from, disposable: isDisposable };
      if (!this.#link.send(message)) this.#refuseWaiting("There is no connection.");
    });
  }

  /** Go on in another session (a copy); the one left behind is freed. */
  switchTo(sessionId, lastChunk) {
    this.free(this.sessionId);
    this.#pending.clear();
    [this.sessionId, this.lastChunk, this.#nextFrame] = [sessionId, lastChunk, 0];
  }

  /** Free this world; nothing of it is heard of any more. */
  end() {
    this.free(this.sessionId);
    this.#pending.clear();
    [this.sessionId, this.lastChunk, this.isHeld] = [null, -1, false];
  }

  /** Whether a request is under way for whose note this holds. */
  isPending(test) {
    return [...this.#pending.values()].some(({ note }) => test(note));
  }

  free(sessionId) {
    this.#link.send({ endpoint: "close", session_id: sessionId });
  }

  // -- messages -------------------------------------------------------------------------------------------------------

  #take(message) {
    switch (message.type) {
      case "frame":
        return this.#frame(message);
      case "error":
        return this.#error(message);
      case "moved":
        return this.#moved(message);
      case "branched":
        this.#waiting?.resolve({ sessionId: message.session_id, nextChunk: message.next_chunk_index });
        this.#waiting = null;
        return undefined;
      case "resumed":
        this.#replaying = message.replayed;
        this.#lookups = 0;
        if (message.next_chunk_index <= this.lastChunk) this.#wentBack(message.next_chunk_index);
        if (this.#replaying > 0) return undefined; // a server that has handed the session on may have some chunks left
        this.#givenUp.clear();
        return this.#goOn();
      default:
        return undefined; // done, reset, closed, and what later servers may say
    }
  }

  #frame(message) {
    const request = this.#pending.get(message.request_id);
    if (request && message.session_id === this.sessionId) {
      if (message.final) this.#pending.delete(message.request_id);
      // after a loss the server sends a chunk that came in part once more, from its first frame on
      if (message.chunk_index > this.lastChunk && message.first_frame >= this.#nextFrame) {
        this.#nextFrame = message.first_frame + message.num_frames;
        request.firstAt ??= performance.now();
        this.#tell("frames", { message, request });
      }
      if (message.chunk_index > this.lastChunk && message.final) {
        this.lastChunk = message.chunk_index;
        this.#givenUp.clear();
        this.#tell("chunk", { message, request });
        if (message.prompt_applied) {
          this.#tell("applied", { prompt: request.note.prompt, frame: this.#nextFrame - message.chunk_frames });
        }
      }
    }
    if (this.#replaying > 0 && --this.#replaying === 0) this.#goOn();
  }

  #error(message) {
    const { request_id: requestId } = message;
    if (requestId === undefined) return this.#trouble(message, false);
    if (requestId === this.#waiting?.requestId) return this.#refuseWaiting(message.message);
    if (requestId === this.#resumeId) return this.#notResumed(message);
    const request = this.#pending.get(requestId);
    if (!request) return undefined; // dropped by this page, for instance by a reset
    this.#pending.delete(requestId);
    const lost = ["session_evicted", "missing_image"].includes(message.code) && this.hasBegun;
    if (message.retryable) this.#notBefore = performance.now() + (message.retry_after_ms ?? RETRY_MS);
    if (message.code === "resync_required" && message.next_chunk_index !== undefined) {
      [this.lastChunk, this.#nextFrame] = [message.next_chunk_index - 1, 0];
    }
    return this.#trouble(message, lost, request);
  }

  #trouble(message, lost, request = null) {
    if (lost) this.isHeld = true;
    this.#tell("trouble", { text: message.message, code: message.code, lost, request, retryable: message.retryable });
  }

  // -- after a loss ---------------------------------------------------------------------------------------------------

  /** The world goes on on another server. What is pending is asked for there again. It is lost with a server that is dead. */
  #moved(message) {
    if (message.session_id !== undefined && message.session_id !== this.sessionId) return;
    if (!this.#link.isUp) return;
    if ((this.#givenUp.get(message.server) ?? 0) >= MAX_GIVEN_UP) {
      this.#isOutOfReach = true;
      this.#trouble({ ...message, message: `it moved to the server '${message.server}', which does not answer` }, true);
    } else {
      this.#link.follow(message.server, message.url ?? null, this.sessionId);
    }
  }

  #interrupt() {
    this.isHeld = this.sessionId !== null;
    this.#replaying = 0;
    this.#refuseWaiting("The connection was lost.");
  }

  #greet() {
    if (this.sessionId === null) return;
    this.isHeld = true;
    const last = this.hasBegun ? { last_chunk_id: this.lastChunk } : {};
    this.#resumeId = `resume-${randomText()}`;
    this.#link.send({ endpoint: "resume", request_id: this.#resumeId, session_id: this.sessionId, ...last });
  }

  /** The server does not know the session: it is another process's, or had not begun, or is gone. */
  #notResumed(message) {
    if (message.code === "resync_required" && message.next_chunk_index !== undefined) {
      [this.lastChunk, this.#nextFrame] = [message.next_chunk_index - 1, 0];
      this.#pending.clear();
      this.#goOn();
    } else if (!this.hasBegun) {
      this.#goOn();
    } else if (++this.#lookups < MAX_LOOKUPS) {
      this.#link.reconnect();
    } else {
      this.#lookups = 0;
      this.#trouble(message, true);
    }
  }

  /** The server was started anew and has the world as it was some chunks ago; it never heard of what is pending. */
  #wentBack(nextChunk) {
    this.lastChunk = nextChunk - 1;
    this.#nextFrame = 0;
    this.#pending.clear();
    this.#tell("rewound", {});
  }

  #goOn() {
    for (const { bytes } of this.#pending.values()) this.#link.send(bytes);
    this.isHeld = false;
    this.#tell("resumed", {});
  }

  #refuseWaiting(text) {
    this.#waiting?.reject(new Error(text));
    this.#waiting = null;
  }

  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

function randomText() {
  return Array.from(crypto.getRandomValues(new Uint32Array(2)), (number) => number.toString(36)).join("");
}
