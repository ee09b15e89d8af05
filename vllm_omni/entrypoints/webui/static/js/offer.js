// SPDX-License-Identifier: Apache-2.0
// What one can begin with on this server: the pictures and prompts of its own world, or else the page's samples.

import { SAMPLES } from "./samples.js";

/**
 * `hello`: the server's greeting; withoutPicture: a world may begin without one. Returns {prompts: [{name, text}], starts: [{name, file, prompt, promptName}],
 * about}: `promptName` is null and `prompts` empty where the page's samples are offered; `about` says what a world can
 * show, "" if nobody says.
 */
export function offer({ world } = {}, withoutPicture = false) {
  const none = withoutPicture ? [{ name: "No picture", file: null, prompt: SAMPLES[0].prompt, promptName: null }] : [];
  if (!world?.starts?.length) {
    const samples = SAMPLES.map((sample) => ({ ...sample, promptName: null }));
    return { prompts: [], about: "", starts: [...none, ...samples] };
  }
  const texts = new Map(world.prompts.map(({ name, text }) => [name, text]));
  const starts = world.starts.map(({ name, file, prompt }) => ({
    name: capital(name),
    file: `world/${file}`,
    prompt: texts.get(prompt),
    promptName: prompt,
  }));
  return { prompts: world.prompts, about: world.about, starts };
}

/** Replace what is in `box` by a button for each prompt; onchoose({name, text}). Empty and hidden without prompts. */
export function promptButtons(box, prompts, onchoose) {
  box.hidden = prompts.length === 0;
  box.replaceChildren(
    ...prompts.map((prompt) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: capital(prompt.name), title: prompt.text });
      button.addEventListener("click", () => onchoose(prompt));
      return button;
    }),
  );
}

/** Mark the button of the prompt whose text is in use. */
export function markPrompt(box, text) {
  for (const button of box.children) button.setAttribute("aria-pressed", button.title === text);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
