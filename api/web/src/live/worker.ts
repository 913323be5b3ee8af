// The shared worker: one hub for all tabs of this browser.

import { Hub } from "./hub";
import type { FromTab } from "./messages";

const hub = new Hub("/api/v1/live");
const scope = globalThis as unknown as { onconnect: (event: MessageEvent) => void };

scope.onconnect = (event) => {
  const port = event.ports[0];
  if (!port) return;
  const tab = { post: (message: unknown) => port.postMessage(message) };
  port.onmessage = (message: MessageEvent<FromTab>) => hub.hear(tab, message.data);
  hub.join(tab);
};
