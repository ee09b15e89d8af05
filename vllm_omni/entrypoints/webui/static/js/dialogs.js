// SPDX-License-Identifier: Apache-2.0
// Dialogs and passing messages: the API key, the help, and what is said to everybody (screen readers included).

const REMEMBERED = "omni-api-key";

/** Returns askKey(wasWrong) -> Promise of the key. A remembered key is kept for this tab only. */
export function keyDialog(dialog) {
  const { key, remember } = dialog.querySelector("form").elements;
  return (wasWrong) => {
    const stored = sessionStorage.getItem(REMEMBERED);
    if (stored !== null && !wasWrong) return Promise.resolve(stored);
    sessionStorage.removeItem(REMEMBERED);
    dialog.querySelector(".wrong").hidden = !wasWrong;
    key.value = "";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.querySelector("form").addEventListener(
        "submit",
        () => {
          if (remember.checked) sessionStorage.setItem(REMEMBERED, key.value);
          resolve(key.value);
        },
        { once: true },
      );
    });
  };
}

/** A message that goes away, or (`action`: {label, run}) waits to be answered. */
export class Notices {
  #box;
  #live;
  #timer = 0;

  constructor(box, live) {
    this.#box = box;
    this.#live = live;
  }

  /** Say it to screen readers only. */
  whisper(text) {
    this.#live.textContent = text;
  }

  show(text, { action = null, isBad = false, stays = action !== null } = {}) {
    clearTimeout(this.#timer);
    const parts = [Object.assign(document.createElement("span"), { textContent: text })];
    if (action) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: action.label });
      button.addEventListener("click", () => {
        this.hide();
        action.run();
      });
      parts.push(button);
    }
    this.#box.replaceChildren(...parts);
    this.#box.classList.toggle("is-bad", isBad);
    this.#box.hidden = false;
    if (!stays) this.#timer = setTimeout(() => this.hide(), 4000 + 40 * text.length);
  }

  /** What is said now; "" = nothing. */
  get text() {
    return this.#box.hidden ? "" : this.#box.firstChild.textContent;
  }

  hide() {
    clearTimeout(this.#timer);
    this.#box.hidden = true;
  }
}
