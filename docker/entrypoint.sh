#!/bin/sh
# The image's entry point: asyncllm with the container's arguments. A server in a container must
# listen on all interfaces to be reached; an explicit --host comes later, and so it wins. A model
# alone (a folder or a hub id, with a slash) is served, and so are options alone.
case ${1-} in
serve)
    shift
    exec asyncllm serve --host 0.0.0.0 "$@"
    ;;
-h | --help | --version)
    exec asyncllm "$@"
    ;;
*/* | -*)
    exec asyncllm serve --host 0.0.0.0 "$@"
    ;;
*)
    exec asyncllm "$@"
    ;;
esac
