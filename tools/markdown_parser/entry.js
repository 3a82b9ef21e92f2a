export { GFM, parser } from "@lezer/markdown";
