import { render } from "preact";
import { App } from "./app";
import { link } from "./live/link";
import { applyTheme } from "./parts/theme";
import { start } from "./router";
import { learn } from "./server";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/parts.css";
import "./styles/pages.css";

applyTheme();
start();
link.connect();
void learn();
render(<App />, document.getElementById("app") as HTMLElement);
