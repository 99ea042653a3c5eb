#!/usr/bin/env bash
# Makes the tools of tests/deploy that are no Debian packages. Usage: tests/deploy/tools.sh DIR
#   DIR/render                     the chart renderer, built from Debian's Go packages
#   DIR/venv/bin/kubernetes-validate
# A tool that cannot be made is left out, with the reason; the tests that need it are then skipped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)

if command -v go >/dev/null; then
  (
    cd "$here/render"
    GO111MODULE=off GOPATH=/usr/share/gocode GOCACHE="$dir/go-cache" GOFLAGS=-trimpath go build -o "$dir/render" .
  ) || rm -f "$dir/render"
else
  echo "render: go is not installed (deploy/install-packages.sh deploy)"
fi

stamp=$dir/venv/requirements.txt
if ! cmp -s "$here/requirements.txt" "$stamp"; then
  rm -rf "$dir/venv"
  if /usr/bin/python3 -m venv --system-site-packages "$dir/venv" &&
    "$dir/venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"; then
    cp "$here/requirements.txt" "$stamp"
  else
    echo "kubernetes-validate: pip could not install it"
    rm -rf "$dir/venv"
  fi
fi
