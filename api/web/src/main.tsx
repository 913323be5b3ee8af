import { render } from "preact";
import { App } from "./app";
import { link } from "./live/link";
import { applyTheme } from "./parts/theme";
import { start } from "./router";
import { learn } from "./server";
import { enter } from "./session";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/parts.css";
import "./styles/pages.css";

applyTheme();
start();
render(<App />, document.getElementById("app") as HTMLElement);
void enter(() => {
  link.connect();
  void learn();
});
