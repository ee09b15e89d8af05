// SPDX-License-Identifier: Apache-2.0
// The list of marks: places in the walk whose world is kept on the server, to go back to and take another way.

export class Marks {
  #list;
  #marks = [];
  #count = 0;
  #onchange;

  /** onback(mark), onchange(marks), onforget(mark). */
  constructor(list, { onback, onforget, onchange }) {
    this.#list = list;
    this.#onchange = onchange;
    list.addEventListener("click", ({ target }) => {
      const button = target.closest("button");
      if (!button) return;
      const mark = this.#marks.find(({ number }) => number === Number(button.closest("li").dataset.number));
      if (button.dataset.act === "back") onback(mark);
      else {
        this.remove(mark);
        onforget(mark);
      }
    });
  }

  get all() {
    return this.#marks.slice();
  }

  /** mark: {sessionId, nextChunk, place, path, prompt, thumbnail (URL)}. */
  add(mark) {
    const number = ++this.#count;
    const kept = { ...mark, number, name: letter(number) };
    this.#marks.push(kept);
    this.#list.append(row(kept));
    this.#onchange(this.#marks);
    return kept;
  }

  remove(mark) {
    this.#marks = this.#marks.filter((other) => other !== mark);
    this.#list.querySelector(`[data-number="${mark.number}"]`)?.remove();
    URL.revokeObjectURL(mark.thumbnail);
    this.#onchange(this.#marks);
  }

  clear() {
    for (const mark of this.all) this.remove(mark);
    this.#count = 0;
  }
}

const letter = (number) => String.fromCharCode(65 + ((number - 1) % 26)) + (number > 26 ? Math.ceil(number / 26) : "");

function row({ number, name, thumbnail, prompt, nextChunk }) {
  const item = document.createElement("li");
  item.dataset.number = number;
  const picture = Object.assign(document.createElement("img"), { src: thumbnail, alt: "" });
  const text = document.createElement("span");
  text.className = "mark-text";
  text.append(
    Object.assign(document.createElement("b"), { textContent: `Mark ${name}` }),
    Object.assign(document.createElement("small"), { textContent: `chunk ${nextChunk} · ${prompt}` }),
  );
  const back = Object.assign(document.createElement("button"), { type: "button", textContent: "Go back" });
  back.dataset.act = "back";
  back.setAttribute("aria-label", `Go back to mark ${name}`);
  const forget = Object.assign(document.createElement("button"), { type: "button", textContent: "×", className: "quiet" });
  forget.dataset.act = "forget";
  forget.setAttribute("aria-label", `Forget mark ${name}`);
  item.append(picture, text, back, forget);
  return item;
}
