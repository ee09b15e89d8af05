// SPDX-License-Identifier: Apache-2.0
// Ties the parts together: what happens with a chunk, a click, a loss. Each part's own work is in its own file.

import { Minimap } from "./minimap.js";
import { decodeJpeg, H264Decoder, h264Decoder } from "./decode.js";
import { Notices } from "./dialogs.js";
import { Marks } from "./marks.js";
import { Pacer } from "./pacer.js";
import { Player } from "./player.js";
import { download, fileName, Recorder } from "./recorder.js";
import { Stats } from "./stats.js";
import { moves, placesOf, startPoseOf, stepsOf, walkingFrames, walks } from "./walking.js";
import { Watch } from "./watch.js";
import { World } from "./world.js";

const MAP_EVERY_MS = 100;
const MAKING_TEXT = "Making the first pictures …";
const ENGINE_FAILED = 1011; // the close code of a server whose engine has died
const TRAIL_CHUNKS = 256;
const OVERDUE_MS = 2000; // or twice what the server usually takes
const AUTOMATIC_EVERY_MS = 10_000; // between marks that are set by themselves
const AUTOMATIC_MARKS = 2;
const LEAST_SESSIONS = 4; // of a server on which visitors may have such marks
const BROKEN_TEXT = "The picture has lost its world.";
const OPEN_VIEW_RADIANS = (30 * Math.PI) / 180; // above or below the horizon; the sky or the ground fills what is beyond
const SHORT_STEP = 0.6; // of the longest step: less means that something stopped the camera or made it slide
const LARGEST_SAVED = 800; // pixels of a saved picture's width, unless the world itself is larger
const SETTLE_S = 2; // of video after a start or a new prompt, which take some chunks to take effect
const ENGINE_TEXT = "The engine has stopped. This world is lost unless the server kept a copy; trying to resume it …";

/** How many times as large pictures and recordings of small worlds are saved, each pixel a square. */
const savedScale = (width) => Math.max(1, Math.min(4, Math.floor(LARGEST_SAVED / width)));

export class App {
  speed = 1;
  turnSpeed = 1;
  isLive = false; // a world has been begun
  isPaused = false;
  isStopped = false; // a request failed for good: nothing is asked for until the visitor says so
  isLost = false; // the server keeps this world no longer
  hasEngineFailed = false; // and no chunk has come since
  isStalled = false; // a picture is overdue, or the server does not answer
  prompt = "";
  appliedFrame = 0; // from which the prompt holds, if it was changed
  #choice = null; // what the world was begun with
  #place = null; // where the last chunk ended, in the world; null = unknown
  #shownPlace = null; // the same of the picture that is shown
  #longestStep = 0; // in this world, in metres
  #isAtObstacle = false; // the last steps were shorter, because something was in the way
  #restlessFrames = 0; // video frames that are still asked for though nothing is held
  #trail = []; // {chunk, place}: where the last chunks ended, in case the server has only earlier ones
  #nextPrompt = null;
  #isAwaited = false; // the world's first picture has not come
  #steadySince = 0; // times that began before are of an outage or a pause, not of the server
  #mapDrawn = 0;
  #automatic = []; // marks set by themselves, the oldest first, each {at, ...} as in `marks`
  #markedAt = 0;
  #works = Promise.resolve(); // what happens between two chunks, one after the other
  #choosing = null; // resolves to the name of the decoder
  #transferMs = null; // from the first to the last message of the last chunk
  #thumbnail = document.createElement("canvas");

  /** elements: view, map, notices, live, marks. onstate(): something the buttons show has changed. */
  constructor(link, controls, game, elements, onstate) {
    this.link = link;
    this.controls = controls;
    this.game = game;
    this.elements = elements;
    this.onstate = onstate;
    this.world = new World(link);
    this.decoder = new H264Decoder();
    this.player = new Player(elements.view);
    this.pacer = new Pacer();
    this.stats = new Stats();
    this.watch = new Watch();
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
    this.world.addEventListener("frames", ({ detail }) => this.#frames(detail));
    this.world.addEventListener("chunk", ({ detail }) => this.#chunk(detail));
    this.world.addEventListener("applied", ({ detail }) => this.#promptApplied(detail));
    this.world.addEventListener("trouble", ({ detail }) => this.#trouble(detail));
    this.world.addEventListener("resumed", () => this.#resumed());
    this.world.addEventListener("rewound", () => this.#rewound());
    this.player.onframe = (frame) => this.#shown(frame);
  }

  // -- what the visitor does ------------------------------------------------------------------------------------------

  /** choice: {image, images, prompt, seed, width, height}; startPose: where it was taken, if not the server knows; notice: what to
   * say of the picture. */
  begin(choice) {
    if (!this.link.isUp) {
      this.notices.show("There is no connection yet; try again in a moment.", { isBad: true });
      return;
    }
    this.recorder.stop();
    this.#forgetAutomatic();
    this.watch.reset();
    this.world.begin();
    this.player.flush();
    this.player.fps = this.link.hello.fps;
    this.pacer.forget();
    this.map.setPath([]);
    [this.#choice, this.prompt, this.#nextPrompt, this.appliedFrame] = [choice, choice.prompt, null, 0];
    [this.#place, this.#shownPlace, this.#trail] = [null, null, []];
    [this.#longestStep, this.#isAtObstacle] = [0, false];
    this.#settle();
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
    const startPose = this.#shownPlace === null ? null : startPoseOf(this.#shownPlace);
    this.begin({ ...this.#choice, prompt: this.prompt, image: new Uint8Array(await blob.arrayBuffer()), startPose });
  }

  leave() {
    if (!this.isLive) return;
    this.recorder.stop();
    this.#forgetAutomatic();
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
    const { width, height } = this.elements.view;
    const scale = savedScale(width);
    const canvas = new OffscreenCanvas(width * scale, height * scale);
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(this.elements.view, 0, 0, canvas.width, canvas.height);
    download(await canvas.convertToBlob({ type: "image/png" }), fileName("png"));
  }

  /** Keep the world as it is after the last chunk, to come back to. */
  async mark() {
    await this.#between(async () => {
      const mark = this.marks.add({ ...(await this.#branch()), thumbnail: await this.#makeThumbnail() });
      this.notices.show(`Mark ${mark.name} is set. Walk on, and come back to it whenever you like.`);
    }, "The mark could not be set");
  }

  /** A copy of the world as it is now, with what the page knows of it. */
  async #branch(isDisposable = false) {
    const { sessionId, nextChunk } = await this.world.branch(this.world.sessionId, isDisposable);
    return { sessionId, nextChunk, place: this.#place, path: this.map.path, prompt: this.prompt };
  }

  /** Go on from a mark, in a new copy of its world; the mark stays. Returns whether that was possible. */
  goBack(mark, text = `Back at mark ${mark.name}.`) {
    return this.#between(async () => {
      const { sessionId, nextChunk } = await this.world.branch(mark.sessionId);
      this.world.switchTo(sessionId, nextChunk - 1);
      this.player.flush();
      [this.#place, this.prompt, this.#nextPrompt, this.appliedFrame] = [mark.place, mark.prompt, null, 0];
      this.map.setPath(mark.path);
      this.#settle();
      this.pause(false);
      this.watch.forgive();
      this.notices.show(text);
    }, "It is not possible to go back there");
  }

  /** Keep a copy of the world every ten seconds, as long as it looks as it should, to go back to when it does not. */
  async #markByItself(now) {
    const isOffered = this.link.hello?.world && this.link.hello.limits.sessions >= LEAST_SESSIONS;
    if (!isOffered || now - this.#markedAt < AUTOMATIC_EVERY_MS || this.#isAwaited || this.isPaused || this.isResting) return;
    if (!this.watch.isGood) return;
    this.#markedAt = now;
    await this.#between(async () => {
      this.#automatic.push({ ...(await this.#branch(true)), at: now });
      if (this.#automatic.length > AUTOMATIC_MARKS) this.world.free(this.#automatic.shift().sessionId);
    }, null);
  }

  #forgetAutomatic() {
    for (const { sessionId } of this.#automatic) this.world.free(sessionId);
    [this.#automatic, this.#markedAt] = [[], performance.now()];
  }

  /** Offer a way out of a picture that has gone flat or broken. */
  #offerWayOut(now) {
    const isSaid = this.notices.text === BROKEN_TEXT;
    if (!this.watch.isBroken(now)) {
      if (isSaid && this.watch.isGood) this.notices.hide();
    } else if (this.notices.text === "") {
      const [mark] = this.#automatic;
      const back = { label: "Go back 10 s", run: () => this.#goBackByItself(mark) };
      const over = { label: "Start over", run: () => this.restart() };
      this.notices.show(BROKEN_TEXT, { action: mark ? back : over });
    }
  }

  async #goBackByItself(mark) {
    this.#automatic = this.#automatic.filter((other) => other === mark);
    if (!(await this.goBack(mark, "Back where the world was whole."))) this.#automatic = []; // the server has closed it
  }

  /**
   * Run `work` when no request is under way and none is sent meanwhile, after what was asked for before in the same way.
   * failure: what to say then; null = nothing. Resolves to whether it has been done.
   */
  #between(work, failure) {
    this.#works = this.#works.then(() => this.#hold(work, failure));
    return this.#works;
  }

  async #hold(work, failure) {
    if (!this.isLive || !this.world.hasBegun || this.world.isHeld || !this.link.isUp) return false;
    this.world.isHeld = true;
    try {
      while (this.world.numPending > 0) {
        await new Promise((resolve) => setTimeout(resolve, 10));
        if (!this.link.isUp) throw new Error("The connection was lost.");
      }
      await work();
      return true;
    } catch (error) {
      if (failure !== null) this.notices.show(`${failure}: ${error.message}`, { isBad: true });
      return false;
    } finally {
      if (this.link.isUp) this.world.isHeld = false;
      this.onstate();
    }
  }

  // -- every picture --------------------------------------------------------------------------------------------------

  tick(now) {
    this.player.isResting = this.isResting;
    this.player.tick(now);
    this.#askInTime();
    this.#noteStall(now);
    if (this.isLive) {
      this.#markByItself(now);
      this.#offerWayOut(now);
    }
    if (now - this.#mapDrawn > MAP_EVERY_MS) {
      this.#mapDrawn = now;
      this.map.draw();
    }
  }

  #askInTime() {
    // After the engine failed a chunk is asked for even in a pause: only its coming shows that the world goes on.
    if (!this.isLive || this.isStopped || (this.isPaused && !this.hasEngineFailed) || !this.world.canAsk) return;
    if (this.isResting) return;
    const bufferedMs = this.hasEngineFailed ? 0 : this.player.bufferedMs;
    if (this.pacer.isTime(bufferedMs, this.world.numPending)) this.#ask();
  }

  /** A picture that stands still must not look live. */
  #noteStall(now) {
    const since = this.world.waitingSince;
    const overdueMs = Math.max(OVERDUE_MS, 2 * (this.pacer.neededMs ?? Infinity));
    const isWaiting = this.isLive && !this.#isAwaited && !this.isPaused && !document.hidden && this.link.isUp;
    const isStalled = isWaiting && ((since !== null && now - since > overdueMs) || this.link.silentMs > OVERDUE_MS);
    if (isStalled === this.isStalled) return;
    this.isStalled = isStalled;
    this.onstate();
  }

  /** Whether nothing would change: nothing is held, awaited or recorded, and the camera has come to rest. */
  get isResting() {
    if (!this.isWalk || !this.world.hasBegun || this.hasEngineFailed || this.recorder.isOn) return false;
    return this.#restlessFrames <= 0 && this.#nextPrompt === null && !this.controls.isActive && this.world.numPending === 0;
  }

  /** Whether a camera walks; other worlds may move by themselves. */
  get isWalk() {
    return this.#space.pose && walks(this.#space);
  }

  /** Whether it is known where the camera is in the world. */
  get isPlaced() {
    return this.#place !== null;
  }

  #settle() {
    this.#restlessFrames = SETTLE_S * (this.link.hello?.fps ?? 0);
  }

  #ask() {
    const { hello } = this.link;
    const first = !this.world.hasBegun;
    const count = first ? hello.first_chunk_frames : hello.chunk_frames;
    const numLatents = Math.ceil(count / hello.vae_stride[0]);
    const { frames, inputAt } = this.isWalk ? this.#walk(numLatents, first) : this.game.take(numLatents);
    const prompt = this.#space.prompt === "none" ? null : first ? this.#choice.prompt : this.#nextPrompt;
    const isRecorded = this.recorder.isOn && !this.recorder.isClosing;
    const { image, images = {} } = this.#choice;
    const named = Object.keys(images).length > 0 ? { images } : {};
    const start = first ? { ...(image ? { image } : {}), ...named, restart: true } : {};
    const { seed, width, height, startPose } = this.#choice;
    const startBody = first ? { seed, width, height, ...(startPose ? { start_pose: startPose } : {}) } : {};
    this.world.ask({
      steering: { actions: frames },
      extra: { ...start, ...(prompt !== null ? { prompt } : {}) },
      extraBody: { ...startBody, ...this.#streamBody(), ...(isRecorded ? { with_mp4: true, mp4_scale: savedScale(this.#choice.width) } : {}) },
      note: { prompt, isRecorded, inputAt, steps: stepsOf(frames) },
    });
    if (prompt !== null) this.#settle();
    else this.#restlessFrames = moves(frames) ? Math.max(this.#restlessFrames, 1) : this.#restlessFrames - count;
    if (!first) this.#nextPrompt = null;
    this.onstate();
  }

  get #space() {
    return this.game.space;
  }

  /** Choose once how frames come: H.264 where the server and the browser have it, otherwise JPEG. */
  async chooseFormat() {
    this.#choosing ??= this.link.hello.codecs?.includes("h264") ? h264Decoder(this.link.hello.fps) : Promise.resolve(null);
    const name = await this.#choosing;
    if (name !== null) this.decoder.name = name;
    this.world.format = name === null || this.decoder.hasFailed ? "jpeg" : "h264";
  }

  /** How frames come, to be shown. */
  get codec() {
    return this.world.format === "h264" ? `H.264 (${this.decoder.name})` : "JPEG";
  }

  /** What the server should know of the stream so far. */
  #streamBody() {
    if (this.decoder.hasFailed) this.world.format = "jpeg";
    if (this.world.format !== "h264") return {};
    const transfer = this.#transferMs === null ? {} : { transfer_ms: this.#transferMs };
    this.#transferMs = null;
    return { ...transfer, ...(this.decoder.wantsKey ? { key_frame: true } : {}) };
  }

  /** Actions of a camera that walks. A session's first latent frame is the start image: what is touched then waits. */
  #walk(count, first) {
    if (first) return { frames: Array.from({ length: count }, () => []), inputAt: null };
    const reading = this.controls.take();
    const how = { speed: this.speed, turnSpeed: this.turnSpeed, space: this.#space };
    return { frames: walkingFrames(reading, count, how), inputAt: reading.inputAt };
  }

  /** Some frames of a chunk have come. */
  #frames({ message, request }) {
    const { inputAt, steps } = request.note;
    request.places ??= this.#placesOf(message, steps);
    const tag = (request.tag ??= { places: request.places, inputAt, sentAt: request.sentAt, cameAt: performance.now() });
    const files = message.codec === "h264" ? [message.video] : message.video;
    request.numBytes = files.reduce((sum, file) => sum + file.length, request.numBytes ?? 0);
    const pictures = message.codec === "h264" ? [this.decoder.decode(message)] : files.map(decodeJpeg);
    const first = request.numCame ?? 0;
    request.numCame = first + message.num_frames;
    const waitMs = performance.now() - request.sentAt - (first * 1000) / this.player.fps;
    request.waitMs = Math.max(request.waitMs ?? 0, waitMs);
    this.player.push(pictures, tag, first, message.chunk_frames);
    for (const warning of message.warnings ?? []) this.notices.show(warning);
  }

  /** A chunk is complete. */
  #chunk({ message, request }) {
    const cameAt = performance.now();
    this.#transferMs = cameAt - (request.firstAt ?? cameAt);
    const isSteady = request.sentAt >= this.#steadySince;
    const wallMs = isSteady ? cameAt - request.sentAt : null;
    if (isSteady) {
      this.pacer.add(wallMs, message.chunk_frames, request.waitMs);
      this.player.setSupply(this.pacer.supply());
    }
    if (this.hasEngineFailed) {
      this.#clearFailure();
      this.#sayResumed();
      this.onstate();
    }
    this.stats.chunk(wallMs, request.numBytes ?? 0, message.timing);
    this.recorder.add(message.mp4, message.chunk_frames);
    this.#closeRecording();
    this.#trail = [...this.#trail.slice(-TRAIL_CHUNKS), { chunk: message.chunk_index, place: this.#place }];
    this.#askInTime();
  }

  /** Where the video frames of a chunk are, as the server says; none where it does not. */
  #placesOf({ world_poses: rows, chunk_index: chunk, chunk_frames: count }, steps) {
    const [before, wasPlaced] = [this.#place, this.isPlaced];
    const places = rows ? placesOf(rows, count, chunk === 0 ? null : (before ?? placesOf(rows, 1, null)[0])) : [];
    this.#place = places.at(-1) ?? null;
    if (before && this.#place && steps > 0) {
      const step = Math.hypot(this.#place.x - before.x, this.#place.z - before.z) / steps;
      this.#longestStep = Math.max(this.#longestStep, step);
      this.#isAtObstacle = step < SHORT_STEP * this.#longestStep;
    }
    if (this.isPlaced !== wasPlaced) this.onstate();
    return places;
  }

  #shown({ tag, index }) {
    this.#shownPlace = tag.places[index] ?? null;
    if (this.#shownPlace) this.map.add(this.#shownPlace);
    if (this.#showsFlatness()) this.watch.forgive();
    else this.watch.look(this.elements.view);
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

  /** Whether a flat picture may be right: of the sky, of the ground, or of a wall or a tree in front of the camera. */
  #showsFlatness() {
    return this.#isAtObstacle || (this.#shownPlace !== null && Math.abs(this.#shownPlace.pitch) > OPEN_VIEW_RADIANS);
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
      this.#restlessFrames = Math.max(this.#restlessFrames, 1); // its frames will not come
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

  /** The server went on from a copy that is some chunks old: that one ended elsewhere. */
  #rewound() {
    this.#trail = this.#trail.filter(({ chunk }) => chunk <= this.world.lastChunk);
    this.#place = this.#trail.at(-1)?.place ?? null;
    this.#settle();
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
