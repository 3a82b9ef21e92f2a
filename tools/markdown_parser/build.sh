#!/usr/bin/env bash
# Builds the page's Markdown parser, one file, from the package that npm has:
#     tools/markdown_parser/build.sh OUTPUT
# The same versions give the same bytes as asyncllm/server/page/static/lezer.js.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
output=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$here"/*.js "$folder"
cd "$folder"
npm install --no-audit --no-fund --silent --no-save --ignore-scripts @lezer/markdown@1.8.1 esbuild@0.28.2
npx esbuild entry.js --bundle --minify --format=esm --log-level=warning --outfile="$output" \
    --alias:@lezer/common=./trees.js --alias:@lezer/highlight=./trees.js \
    --banner:js='// @lezer/markdown 1.8.1 with small trees, made by tools/markdown_parser/build.sh.
// MIT licence: see lezer_license.txt.'
