#!/bin/sh
# Build an image with buildah, also where no container engine can run:
#
#   docker/build.sh [--ask] [cpu|gpu] [NAME]
#
# It needs root and Debian's package buildah; nothing is left behind but the image. With --ask, the
# server is then started from the image, as its user and with its entry point, and asked a question
# (which needs curl).
#
# From the environment:
#   ROOTFS        a folder with a Debian or Ubuntu that has python3 and python3-venv, as debootstrap
#                 makes it: the base of all stages, where images cannot be pulled
#   FIND_LINKS    a folder of wheels to use before the package index
#   TORCH_INDEX   where the cpu image gets PyTorch from; "" is PyPI
#   MODEL_KERNELS, FLASHINFER   as in the Dockerfile
set -eu

ask=
if [ "${1-}" = --ask ]; then
    ask=yes
    shift
fi
target=${1:-cpu}
name=${2:-localhost/asyncllm:$target}
cd "$(dirname "$0")/.."

# No engine, no mounts that need privileges, the network of this machine.
export STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}" BUILDAH_ISOLATION=chroot

# Older buildahs leave out a stage whose name is an argument's value.
file=$(mktemp)
trap 'rm -f "$file"' EXIT
sed "s/\${FLASHINFER}/${FLASHINFER:-no}/" docker/Dockerfile >"$file"

set -- --format docker --network host --file "$file" --target "$target" --tag "$name"
if [ -n "${ROOTFS-}" ]; then
    base=localhost/asyncllm-base
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$ROOTFS" / >/dev/null
    buildah commit --quiet --rm "$container" "$base" >/dev/null
    set -- "$@" --build-arg "PYTHON_IMAGE=$base" --build-arg "CUDA_IMAGE=$base"
    # The machine's certificates: its proxy may have one of its own.
    set -- "$@" --volume /etc/ssl/certs:/etc/ssl/certs:ro
fi
if [ -n "${FIND_LINKS-}" ]; then
    set -- "$@" --volume "$FIND_LINKS:/wheels:ro" --build-arg PIP_FIND_LINKS=/wheels
fi
for argument in TORCH_INDEX MODEL_KERNELS FLASHINFER; do
    if eval "[ -n \"\${$argument+set}\" ]"; then
        set -- "$@" --build-arg "$argument=$(eval "printf %s \"\$$argument\"")"
    fi
done
buildah build "$@" .
buildah images "$name"
[ -n "$ask" ] || exit 0

port=${PORT:-18300}
url=http://127.0.0.1:$port
container=$(buildah from "$name")
server=
stop() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" || true
    rm -f "$file"
    buildah rm "$container" >/dev/null
}
trap stop EXIT
trap 'exit 1' INT TERM
buildah run "$container" -- asyncllm-entrypoint serve --device cpu --port "$port" &
server=$!
tries=120
until curl --silent --fail "$url/ready" >/dev/null; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] && kill -0 "$server" || { echo "the server did not start" >&2; exit 1; }
    sleep 1
done
curl --silent --show-error --fail "$url/v1/chat/completions" \
    --json '{"messages": [{"role": "user", "content": "What is 27 + 45?"}]}' |
    tee /dev/stderr | grep --quiet '27 + 45 = 72'
echo
