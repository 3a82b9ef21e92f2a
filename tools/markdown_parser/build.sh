#!/usr/bin/env bash
# Builds the page's Markdown parser, one file, from the packages that npm has:
#     tools/markdown_parser/build.sh OUTPUT
# The same versions give the same bytes as asyncllm/server/page/static/lezer.js.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
output=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$here"/*.js "$folder"
cd "$folder"
npm install --no-audit --no-fund --silent --no-save --ignore-scripts \
    @lezer/markdown@1.8.1 @lezer/common@1.5.5 esbuild@0.28.2
npx esbuild entry.js --bundle --minify --format=esm --alias:@lezer/highlight=./no_highlight.js \
    --banner:js='// @lezer/markdown 1.8.1 and @lezer/common 1.5.5, made by tools/markdown_parser/build.sh.
// MIT licence: see lezer_license.txt.' --outfile="$output"
