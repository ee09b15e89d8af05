// SPDX-License-Identifier: Apache-2.0
// Dialogs and passing messages: the API key, the help, and what is said to everybody (screen readers included).

const REMEMBERED = "omni-api-key";

const element = (name, properties, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};

/** Add the dialog to the page. Returns askKey(wasWrong) -> Promise of the key. A remembered key is kept for this tab only. */
export function keyDialog() {
  const key = element("input", { name: "key", type: "password", autocomplete: "current-password", required: true, autofocus: true });
  const remember = element("input", { name: "remember", type: "checkbox" });
  const wrong = element("p", { className: "wrong", role: "alert", hidden: true }, "That key was not accepted.");
  const form = element(
    "form",
    { method: "dialog" },
    element("h2", { id: "key-title" }, "This server needs an API key"),
    wrong,
    element("label", {}, "API key ", key),
    element("label", { className: "check" }, remember, " Keep it until this tab is closed"),
    element("button", { className: "main" }, "Connect"),
    element("p", { className: "hint" }, "It is sent to this server only."),
  );
  const dialog = element("dialog", { id: "key-dialog" }, form);
  dialog.setAttribute("aria-labelledby", "key-title");
  document.body.append(dialog);
  return (wasWrong) => {
    const stored = sessionStorage.getItem(REMEMBERED);
    if (stored !== null && !wasWrong) return Promise.resolve(stored);
    sessionStorage.removeItem(REMEMBERED);
    wrong.hidden = !wasWrong;
    key.value = "";
    dialog.showModal();
    return new Promise((resolve) => {
      form.addEventListener(
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
