// SPDX-License-Identifier: Apache-2.0
// The panel before a world begins: start image (sample, file, drop or paste), prompt, size, seed.

import { markPrompt, offer, promptButtons } from "./offer.js";

const MAX_SEED = 2 ** 31;
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp"];
const HEIC = /^image\/hei[cf]|\.hei[cf]$/i;
const LARGEST_SIDE = 2048; // larger pictures are scaled down here: no world is made at more
const REFERENCE_SIDE = 1024; // of pictures that are sent besides: all of them share one message
const SENT_QUALITY = 0.92;

export class StartPanel {
  #form;
  #gallery;
  #image = null; // {bytes: () => Promise<Uint8Array>, notice}
  #ownPrompt = false;
  #takesPrompt = true;
  #takesImage = true;
  #offer = offer();
  #limits = { max_image_bytes: Infinity };
  #named = new Map(); // name -> picture of an image that the model takes besides
  #uploadUrl = null;
  #taken = null; // the file that was chosen last

  /** onstart({image, images, prompt, seed, width, height}); ontrouble(text). */
  constructor(form, onstart, ontrouble) {
    this.#form = form;
    this.#gallery = form.querySelector(".gallery");
    this.ontrouble = ontrouble;
    const { upload, prompt, dice } = form.elements;
    upload.addEventListener("change", () => upload.files[0] && this.#take(upload.files[0]));
    prompt.addEventListener("input", () => {
      this.#ownPrompt = prompt.value.trim() !== "";
      markPrompt(this.#prompts, prompt.value);
    });
    dice.addEventListener("click", () => this.rollSeed());
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const choice = await this.#choice();
      if (choice) onstart(choice);
    });
    addEventListener("paste", ({ clipboardData }) => {
      const file = [...clipboardData.files].find(({ type }) => IMAGE_TYPES.includes(type));
      if (file && !form.hidden && this.#takesImage) this.#take(file);
    });
    const zone = form.parentElement;
    zone.addEventListener("dragover", (event) => {
      event.preventDefault();
      form.classList.toggle("is-target", !form.hidden);
    });
    zone.addEventListener("dragleave", () => form.classList.remove("is-target"));
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      form.classList.remove("is-target");
      if (!form.hidden && this.#takesImage && event.dataTransfer.files[0]) this.#take(event.dataTransfer.files[0]);
    });
    this.#offerStarts(null);
    this.rollSeed();
  }

  rollSeed() {
    this.#form.elements.seed.value = crypto.getRandomValues(new Uint32Array(1))[0] % MAX_SEED;
  }

  /** Offer what this server can make. */
  configure(hello) {
    this.#limits = hello.limits;
    this.#form.elements.prompt.maxLength = hello.limits.max_prompt_chars;
    const select = this.#form.elements.size;
    const chosen = select.value;
    select.replaceChildren(...sizes(hello).map(([width, height]) => new Option(`${width} × ${height}`, `${width}x${height}`)));
    if ([...select.options].some(({ value }) => value === chosen)) select.value = chosen;
    this.#form.elements.start.disabled = false;
    this.#form.elements.prompt.required = hello.actions.prompt === "required";
    this.#takesPrompt = hello.actions.prompt !== "none";
    this.#form.querySelector(".prompt-field").hidden = !this.#takesPrompt;
    this.#takesImage = hello.actions.image !== "none";
    this.#gallery.hidden = !this.#takesImage;
    this.#offerNamed(hello.actions.images ?? []);
    const offered = offer(hello, hello.actions.image === "optional");
    if (JSON.stringify(offered) === JSON.stringify(this.#offer)) return; // a connection that is back changes nothing
    this.#offer = offered;
    promptButtons(this.#prompts, offered.prompts, ({ name, text }) => {
      this.#ownPrompt = false;
      this.#form.elements.prompt.value = text;
      this.#offerStarts(name);
    });
    this.#form.querySelector(".about").textContent = offered.about;
    this.#offerStarts(offered.prompts[0]?.name ?? null);
  }

  get #prompts() {
    return this.#form.querySelector(".prompts");
  }

  set isShown(shown) {
    this.#form.hidden = !shown;
    if (shown) this.#form.elements.start.focus({ preventScroll: true });
  }

  get isShown() {
    return !this.#form.hidden;
  }

  async #choice() {
    const { prompt, seed, size } = this.#form.elements;
    const [width, height] = size.value.split("x").map(Number);
    try {
      const image = this.#takesImage ? await this.#image.bytes() : null;
      const images = {};
      for (const [name, picture] of this.#named) images[name] = new Uint8Array(await picture.arrayBuffer());
      return {
        image,
        images,
        prompt: this.#takesPrompt ? prompt.value.trim() : "",
        seed: Math.abs(Math.trunc(Number(seed.value))) || 0,
        width,
        height,
        notice: this.#image?.notice,
      };
    } catch {
      this.ontrouble("The start image could not be loaded.");
      return null;
    }
  }

  /** A place for each image that the model takes besides its start image. A click on a chosen one removes it. */
  #offerNamed(images) {
    const places = this.#form.querySelector(".references");
    const names = images.map(({ name }) => name).join();
    if (places.dataset.names === names) return; // a connection that is back changes nothing
    places.dataset.names = names;
    places.hidden = images.length === 0;
    this.#named.clear();
    for (const tile of places.querySelectorAll(".tile")) tile.remove();
    places.append(...images.map((image) => this.#namedTile(image)));
  }

  #namedTile({ name, title }) {
    const tile = Object.assign(document.createElement("label"), { className: "tile reference", title });
    const input = Object.assign(document.createElement("input"), { type: "file", name: `image-${name}`, accept: IMAGE_TYPES.join() });
    const shown = Object.assign(document.createElement("img"), { alt: "", width: 832, height: 480 });
    const plus = Object.assign(document.createElement("span"), { className: "plus", textContent: "+" });
    plus.setAttribute("aria-hidden", "true");
    tile.append(input, shown, plus, Object.assign(document.createElement("span"), { className: "caption", textContent: name }));
    const show = (picture) => {
      if (shown.src) URL.revokeObjectURL(shown.src);
      tile.classList.toggle("has-image", picture !== null);
      tile.classList.toggle("is-chosen", picture !== null);
      if (picture === null) this.#named.delete(name);
      else this.#named.set(name, picture);
      if (picture === null) shown.removeAttribute("src");
      else shown.src = URL.createObjectURL(picture);
    };
    input.addEventListener("click", (event) => {
      if (!this.#named.has(name)) return;
      event.preventDefault();
      input.value = "";
      show(null);
    });
    input.addEventListener("change", async () => {
      const picture = input.files[0] ? await this.#readable(input.files[0], REFERENCE_SIDE) : null;
      if (picture) show(picture);
      else input.value = "";
    });
    return tile;
  }

  /** The picture in a file, scaled down if it is too large; null, after a notice, if it is none. */
  async #readable(file, side) {
    if (HEIC.test(file.type) || HEIC.test(file.name)) {
      this.ontrouble("Browsers cannot read HEIC pictures. Export it as JPEG; an iPhone does so with the setting “Most Compatible”.");
      return null;
    }
    if (!IMAGE_TYPES.includes(file.type)) {
      this.ontrouble("Use a PNG, JPEG or WebP picture.");
      return null;
    }
    const picture = await fitting(file, this.#limits, side);
    if (picture === null) this.ontrouble(`${file.name} is no picture that can be read.`);
    return picture;
  }

  /** Offer a file as the start image, if it is a picture; a large one is scaled down first. */
  async #take(file) {
    this.#taken = file;
    const picture = await this.#readable(file, LARGEST_SIDE);
    if (picture === null || this.#taken !== file) return undefined; // or another one was chosen meanwhile
    if (this.#uploadUrl) URL.revokeObjectURL(this.#uploadUrl);
    this.#uploadUrl = URL.createObjectURL(picture);
    const tile = this.#gallery.querySelector(".upload");
    tile.querySelector("img").src = this.#uploadUrl;
    tile.classList.add("has-image");
    tile.querySelector(".caption").textContent = file.name;
    this.#image = { bytes: async () => new Uint8Array(await picture.arrayBuffer()), notice: this.#offer.about };
    for (const radio of this.#form.querySelectorAll("[name=sample]")) radio.checked = false;
    tile.classList.add("is-chosen");
    return undefined;
  }

  /** Show the pictures that fit the prompt of this name (null = all), and choose the same one as before, or the first. */
  #offerStarts(promptName) {
    const starts = this.#offer.starts.filter((start) => promptName === null || start.promptName === promptName);
    const before = this.#form.querySelector("[name=sample]:checked")?.closest("label").querySelector(".caption").textContent;
    const isOwn = this.#form.querySelector(".upload").classList.contains("is-chosen");
    for (const radio of this.#form.querySelectorAll("[name=sample]")) radio.closest("label").remove();
    const radios = starts.map((start) => this.#addStart(start));
    const index = Math.max(0, starts.findIndex(({ name }) => name === before));
    if (isOwn) return markPrompt(this.#prompts, this.#form.elements.prompt.value);
    radios[index].checked = true;
    return this.#choose(starts[index]);
  }

  #addStart(start) {
    const tile = document.createElement("label");
    tile.className = "tile";
    const radio = Object.assign(document.createElement("input"), { type: "radio", name: "sample", value: start.name });
    const picture = Object.assign(document.createElement("img"), { alt: "", width: 832, height: 480 });
    if (start.file) picture.src = start.file;
    const caption = Object.assign(document.createElement("span"), { className: "caption", textContent: start.name });
    radio.addEventListener("change", () => this.#choose(start));
    tile.append(radio, picture, caption);
    this.#gallery.insertBefore(tile, this.#gallery.querySelector(".upload"));
    return radio;
  }

  #choose({ file, prompt }) {
    this.#taken = null;
    this.#gallery.querySelector(".upload").classList.remove("is-chosen");
    this.#image = {
      bytes: async () => {
        if (!file) return null;
        const answer = await fetch(file);
        if (!answer.ok) throw new Error(answer.statusText);
        return new Uint8Array(await answer.arrayBuffer());
      },
    };
    if (!this.#ownPrompt) this.#form.elements.prompt.value = prompt;
    markPrompt(this.#prompts, this.#form.elements.prompt.value);
  }
}

/** The file itself, or a smaller picture of what it shows if it is too large to send; null if it cannot be read. */
async function fitting(file, { max_image_bytes: mostBytes, max_image_pixels: mostPixels = Infinity }, side) {
  const picture = await createImageBitmap(file).catch(() => null);
  if (picture === null) return null;
  const { width, height } = picture;
  const scale = Math.min(1, side / Math.max(width, height), Math.sqrt(mostPixels / (width * height)));
  if (scale === 1 && file.size <= mostBytes) return file;
  const canvas = new OffscreenCanvas(Math.max(1, Math.floor(width * scale)), Math.max(1, Math.floor(height * scale)));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas.convertToBlob({ type: "image/jpeg", quality: SENT_QUALITY });
}

/** The sizes that the world was trained at; else the default size, and smaller ones of about its shape. */
function sizes({ default_size: [width, height], size_multiple: [wide, high], max_area: most, world }) {
  const trained = (world?.sizes ?? []).filter(([w, h]) => w * h <= most);
  if (trained.length > 0) return trained;
  const offered = new Map();
  for (const scale of [1, 0.75, 0.5, 0.25]) {
    const w = Math.max(wide, Math.floor((width * scale) / wide) * wide);
    const h = Math.max(high, Math.floor((height * scale) / high) * high);
    if (scale === 1 || Math.min(w, h) >= 96) offered.set(`${w}x${h}`, [w, h]);
  }
  return [...offered.values()];
}
