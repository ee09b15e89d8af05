// SPDX-License-Identifier: Apache-2.0
// Ties the parts together: what happens with a chunk, a click, a loss. Each part's own work is in its own file.

import { intrinsicsFor, poseOf, START, walk } from "./camera.js";
import { Minimap } from "./minimap.js";
import { Notices } from "./dialogs.js";
import { Marks } from "./marks.js";
import { Pacer } from "./pacer.js";
import { Player } from "./player.js";
import { download, fileName, Recorder } from "./recorder.js";
import { Stats } from "./stats.js";
import { World } from "./world.js";

const MAP_EVERY_MS = 100;
const MAKING_TEXT = "Making the first pictures …";
const ENGINE_FAILED = 1011; // the close code of a server whose engine has died
const TRAIL_CHUNKS = 256;
const ENGINE_TEXT = "The engine has stopped. This world is lost unless the server kept a copy; trying to resume it …";

export class App {
  speed = 1;
  turnSpeed = 1;
  isLive = false; // a world has been begun
  isPaused = false;
  isStopped = false; // a request failed for good: nothing is asked for until the visitor says so
  isLost = false; // the server keeps this world no longer
  hasEngineFailed = false; // and no chunk has come since
  prompt = "";
  #choice = null; // what the world was begun with
  #place = START; // where the next chunk sets out
  #trail = []; // {chunk, place}: where the last chunks ended, in case the server has only earlier ones
  #nextPrompt = null;
  #isAwaited = false; // the world's first picture has not come
  #steadySince = 0; // times that began before are of an outage or a pause, not of the server
  #mapDrawn = 0;
  #thumbnail = document.createElement("canvas");

  /** elements: view, map, notices, live, marks. onstate(): something the buttons show has changed. */
  constructor(link, controls, game, elements, onstate) {
    this.link = link;
    this.controls = controls;
    this.game = game;
    this.elements = elements;
    this.onstate = onstate;
    this.world = new World(link);
    this.player = new Player(elements.view);
    this.pacer = new Pacer();
    this.stats = new Stats();
    this.map = new Minimap(elements.map);
    this.notices = new Notices(elements.notices, elements.live);
    this.marks = new Marks(elements.marks, {
      onback: (mark) => this.goBack(mark),
      onforget: (mark) => this.world.free(mark.sessionId),
      onchange: (marks) => this.map.setMarks(marks),
    });
    this.recorder = new Recorder(
      (blob, numFrames) => {
        download(blob, fileName("mp4"));
        this.notices.show(`Saved ${numFrames} frames as MP4.`);
      },
      (text) => this.notices.show(text),
    );
    this.world.addEventListener("chunk", ({ detail }) => this.#chunk(detail));
    this.world.addEventListener("applied", ({ detail }) => this.#promptApplied(detail));
    this.world.addEventListener("trouble", ({ detail }) => this.#trouble(detail));
    this.world.addEventListener("resumed", () => this.#resumed());
    this.world.addEventListener("rewound", () => this.#rewound());
    this.player.onframe = (frame) => this.#shown(frame);
  }

  // -- what the visitor does ------------------------------------------------------------------------------------------

  /** choice: {image, prompt, seed, width, height}; place: where it was taken; notice: what to say of the picture. */
  begin(choice) {
    if (!this.link.isUp) {
      this.notices.show("There is no connection yet; try again in a moment.", { isBad: true });
      return;
    }
    this.recorder.stop();
    this.world.begin();
    this.player.flush();
    this.player.fps = this.link.hello.fps;
    this.pacer.forget();
    this.map.setPath([]);
    [this.#choice, this.#place, this.prompt, this.#nextPrompt] = [choice, choice.place ?? START, choice.prompt, null];
    [this.isLive, this.isPaused, this.player.isPaused, this.#isAwaited] = [true, false, false, true];
    this.#clearFailure();
    this.controls.take();
    this.game.take(1);
    this.#showStart(choice);
    this.notices.show(MAKING_TEXT, { stays: true });
    this.onstate();
  }

  /** Show the start image, at the size the world will have, until its first frame comes. */
  async #showStart(choice) {
    const { view } = this.elements;
    view.classList.remove("has-picture", "has-start");
    if (!choice.image) return;
    const picture = await createImageBitmap(new Blob([choice.image])).catch(() => null); // the server says what is wrong
    if (picture && this.#choice === choice && this.#isAwaited) {
      this.player.showStill(picture, choice.width, choice.height);
      view.classList.add("has-start");
    }
    picture?.close();
  }

  restart({ seed = this.#choice?.seed } = {}) {
    if (this.isLive) this.begin({ ...this.#choice, prompt: this.prompt, seed });
  }

  /** Begin a new world from the picture that is on the screen, or as before where worlds begin without one. */
  async beginFromView() {
    if (this.#space.image === "none") return this.restart();
    const blob = await new Promise((resolve) => this.elements.view.toBlob(resolve, "image/png"));
    this.begin({ ...this.#choice, prompt: this.prompt, image: new Uint8Array(await blob.arrayBuffer()), place: this.#place });
  }

  leave() {
    if (!this.isLive) return;
    this.recorder.stop();
    this.marks.all.forEach(({ sessionId }) => this.world.free(sessionId));
    this.marks.clear();
    this.world.end();
    this.player.flush();
    this.notices.hide();
    this.isLive = false;
    this.#clearFailure();
    this.onstate();
  }

  pause(paused = !this.isPaused) {
    if (!this.isLive) return;
    this.isPaused = this.player.isPaused = paused;
    if (!paused) this.steady();
    this.notices.whisper(paused ? "Paused" : "Running");
    this.onstate();
  }

  /** Times are measured from now on: what came before was not the server's doing. */
  steady() {
    this.#steadySince = performance.now();
  }

  setPrompt(text) {
    this.#nextPrompt = text;
    this.onstate();
  }

  get promptState() {
    return this.#nextPrompt !== null ? "queued" : null;
  }

  record() {
    if (this.recorder.isOn) {
      this.recorder.isClosing = true;
      this.#closeRecording();
    } else if (this.isLive) {
      this.recorder.start();
      this.notices.whisper("Recording");
    }
    this.onstate();
  }

  /** End the recording with the last chunk that was asked for while it ran. */
  #closeRecording() {
    if (!this.recorder.isClosing || this.world.isPending(({ isRecorded }) => isRecorded)) return;
    this.recorder.stop();
    this.onstate();
  }

  async savePicture() {
    const blob = await new Promise((resolve) => this.elements.view.toBlob(resolve, "image/png"));
    if (blob) download(blob, fileName("png"));
  }

  /** Keep the world as it is after the last chunk, to come back to. */
  async mark() {
    await this.#between(async () => {
      const { sessionId, nextChunk } = await this.world.branch();
      const mark = this.marks.add({
        sessionId,
        nextChunk,
        place: this.#place,
        path: this.map.path,
        prompt: this.prompt,
        thumbnail: await this.#makeThumbnail(),
      });
      this.notices.show(`Mark ${mark.name} is set. Walk on, and come back to it whenever you like.`);
    }, "The mark could not be set");
  }

  /** Go on from a mark, in a new copy of its world; the mark stays. */
  async goBack(mark) {
    await this.#between(async () => {
      const { sessionId, nextChunk } = await this.world.branch(mark.sessionId);
      this.world.switchTo(sessionId, nextChunk - 1);
      this.player.flush();
      [this.#place, this.prompt, this.#nextPrompt] = [mark.place, mark.prompt, null];
      this.map.setPath(mark.path);
      this.pause(false);
      this.notices.show(`Back at mark ${mark.name}.`);
    }, "It is not possible to go back there");
  }

  /** Run `work` when no request is under way and none is sent meanwhile. */
  async #between(work, failure) {
    if (!this.isLive || !this.world.hasBegun || this.world.isHeld || !this.link.isUp) return;
    this.world.isHeld = true;
    try {
      while (this.world.numPending > 0) {
        await new Promise((resolve) => setTimeout(resolve, 10));
        if (!this.link.isUp) throw new Error("The connection was lost.");
      }
      await work();
    } catch (error) {
      this.notices.show(`${failure}: ${error.message}`, { isBad: true });
    } finally {
      if (this.link.isUp) this.world.isHeld = false;
      this.onstate();
    }
  }

  // -- every picture --------------------------------------------------------------------------------------------------

  tick(now) {
    this.player.tick(now);
    this.#askInTime();
    if (now - this.#mapDrawn > MAP_EVERY_MS) {
      this.#mapDrawn = now;
      this.map.draw();
    }
  }

  #askInTime() {
    // After the engine failed a chunk is asked for even in a pause: only its coming shows that the world goes on.
    if (!this.isLive || this.isStopped || (this.isPaused && !this.hasEngineFailed) || !this.world.canAsk) return;
    const bufferedMs = this.hasEngineFailed ? 0 : this.player.bufferedMs;
    if (this.pacer.isTime(bufferedMs, this.world.numPending)) this.#ask();
  }

  #ask() {
    const { hello } = this.link;
    const first = !this.world.hasBegun;
    const count = first ? hello.first_chunk_frames : hello.chunk_frames;
    const { steering, places, inputAt } = this.#space.pose ? this.#walk(count, first) : this.#play(count);
    const prompt = this.#space.prompt === "none" ? null : first ? this.#choice.prompt : this.#nextPrompt;
    const isRecorded = this.recorder.isOn && !this.recorder.isClosing;
    const start = first ? { ...(this.#choice.image ? { image: this.#choice.image } : {}), restart: true } : {};
    const startBody = first ? { seed: this.#choice.seed, width: this.#choice.width, height: this.#choice.height } : {};
    this.world.ask({
      steering,
      extra: { ...start, ...(prompt !== null ? { prompt } : {}) },
      extraBody: { ...startBody, ...(isRecorded ? { with_mp4: true } : {}) },
      note: { places, prompt, isRecorded, inputAt, from: this.#place },
    });
    this.#place = places.at(-1) ?? this.#place;
    if (!first) this.#nextPrompt = null;
    this.onstate();
  }

  get #space() {
    return this.game.space;
  }

  /** A chunk of a world that a camera walks through: a pose for each of its pixel frames. */
  #walk(count, first) {
    const { hello } = this.link;
    const reading = this.controls.take();
    const pace = { framesPerStep: hello.vae_stride[0], speed: this.speed, turnSpeed: this.turnSpeed };
    const places = walk(this.#place, count, reading, pace, first);
    const intrinsics = intrinsicsFor(hello.intrinsics_reference_size, hello.key_focal, this.#choice);
    return { steering: { cameras: { poses: places.map(poseOf), intrinsics } }, places, inputAt: reading.inputAt };
  }

  /** A chunk of a world of buttons and axes: actions for each of its latent frames. */
  #play(count) {
    const { frames, inputAt } = this.game.take(Math.ceil(count / this.link.hello.vae_stride[0]));
    return { steering: { actions: frames }, places: [], inputAt };
  }

  #chunk({ message, request }) {
    const cameAt = performance.now();
    const isSteady = request.sentAt >= this.#steadySince;
    const wallMs = isSteady ? cameAt - request.sentAt : null;
    if (isSteady) {
      this.pacer.add(wallMs, message.num_frames);
      this.player.setSupply(this.pacer.supply());
    }
    if (this.hasEngineFailed) {
      this.#clearFailure();
      this.#sayResumed();
      this.onstate();
    }
    this.stats.chunk(wallMs, message.video.reduce((sum, file) => sum + file.length, 0), message.timing);
    this.recorder.add(message.mp4, message.num_frames);
    this.#closeRecording();
    const { places, inputAt } = request.note;
    this.#trail = [...this.#trail.slice(-TRAIL_CHUNKS), { chunk: message.chunk_index, place: places.at(-1) ?? this.#place }];
    this.player.push(message.video, { places, inputAt, sentAt: request.sentAt, cameAt });
    this.#askInTime();
    for (const warning of message.warnings ?? []) this.notices.show(warning);
  }

  #shown({ tag, index }) {
    if (tag.places[index]) this.map.add(tag.places[index]);
    if (index === 0 && tag.inputAt !== null && tag.inputAt >= this.#steadySince) {
      this.stats.photon(tag.inputAt, tag.sentAt, tag.cameAt, performance.now());
    }
    if (!this.#isAwaited) return;
    this.#isAwaited = false;
    this.elements.view.classList.add("has-picture");
    this.notices.hide();
    if (this.#choice.notice) this.notices.show(this.#choice.notice);
    this.onstate();
  }

  #promptApplied({ prompt, frame }) {
    if (prompt === null || prompt === undefined) return;
    const changed = prompt !== this.prompt;
    this.prompt = prompt;
    if (changed || frame > 0) this.notices.whisper(`The new prompt holds from frame ${frame}.`);
    this.appliedFrame = frame;
    this.onstate();
  }

  // -- what goes wrong ------------------------------------------------------------------------------------------------

  #trouble({ text, code, lost, request, retryable }) {
    if (request) {
      // Its frames will not come: set out again from where it did.
      this.#place = request.note.from;
      this.#closeRecording();
      if (request.note.prompt !== null && this.world.hasBegun) this.#nextPrompt ??= request.note.prompt;
    }
    if (lost) {
      this.isLost = true;
      this.notices.show(`This world is lost: the server no longer keeps it (${text}).`, {
        isBad: true,
        action: { label: this.#space.image === "none" ? "Start over" : "Go on from this picture", run: () => this.beginFromView() },
      });
    } else if (retryable) {
      if (code !== "resync_required") this.notices.show(`Trying again: ${text}`);
    } else {
      this.isStopped = true;
      this.notices.show(text, { isBad: true, action: { label: "Try again", run: () => this.#tryAgain() } });
    }
    this.onstate();
  }

  #tryAgain() {
    this.isStopped = false;
    this.steady();
    this.onstate();
  }

  /** The connection was lost. code: the server's close code, if it gave one. */
  interrupted({ reason, retryMs, code }) {
    if (!this.isLive) return;
    this.isStopped = false; // the connection says more than its last error
    this.hasEngineFailed ||= code === ENGINE_FAILED;
    if (this.isLost || retryMs === 0) return;
    if (this.hasEngineFailed) {
      this.notices.show(ENGINE_TEXT, { isBad: true, stays: true });
    } else {
      this.notices.show(`Connection lost (${reason}). Reconnecting …`, { stays: true });
    }
  }

  /** The connection is back and the server knows the session. */
  #resumed() {
    this.steady();
    if (!this.hasEngineFailed) this.#sayResumed();
    this.onstate();
  }

  /** The server went on from a copy that is some chunks old: set out from where that one ended. */
  #rewound() {
    const known = this.#trail.filter(({ chunk }) => chunk <= this.world.lastChunk);
    this.#place = known.at(-1)?.place ?? this.#place;
    this.#trail = known;
    this.#closeRecording();
  }

  #sayResumed() {
    if (this.#isAwaited) this.notices.show(MAKING_TEXT, { stays: true });
    else this.notices.show("This world is resumed.");
  }

  #clearFailure() {
    [this.isStopped, this.isLost, this.hasEngineFailed] = [false, false, false];
    this.steady();
  }

  async #makeThumbnail() {
    const { view } = this.elements;
    [this.#thumbnail.width, this.#thumbnail.height] = [160, Math.round((160 * view.height) / view.width)];
    this.#thumbnail.getContext("2d").drawImage(view, 0, 0, this.#thumbnail.width, this.#thumbnail.height);
    const blob = await new Promise((resolve) => this.#thumbnail.toBlob(resolve, "image/jpeg", 0.8));
    return URL.createObjectURL(blob);
  }
}
