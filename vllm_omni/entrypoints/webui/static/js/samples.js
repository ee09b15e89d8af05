// SPDX-License-Identifier: Apache-2.0
// Start images that come with the page, and a prompt that fits each.

export const SAMPLES = [
  {
    name: "Harbour",
    file: "samples/harbour.jpg",
    prompt: "A quiet harbour at dawn, fishing boats at the quay, mist over the water, soft golden light",
  },
  {
    name: "Desert",
    file: "samples/desert.jpg",
    prompt: "A desert under a starry night sky, rolling dunes, a full moon, blue shadows on the sand",
  },
  {
    name: "Forest",
    file: "samples/forest.jpg",
    prompt: "A forest path in autumn, tall trees, fallen leaves, sun rays between the trunks",
  },
];
