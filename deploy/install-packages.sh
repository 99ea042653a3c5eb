#!/usr/bin/env bash
# Installs the Debian packages named in deploy/packages/LIST.txt, those that are missing only.
#   deploy/install-packages.sh build lint
# The same lists serve `make`, CI and the images.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
missing=()
for list in "$@"; do
  while read -r package _; do
    [[ -z "$package" || "$package" == \#* ]] && continue
    if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed'; then
      missing+=("$package")
    fi
  done <"$here/packages/$list.txt"
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

echo "Installing: ${missing[*]}"
as_root=()
if [[ $(id -u) -ne 0 ]]; then
  command -v sudo >/dev/null || {
    echo "These packages are missing and this user cannot install them; as root, run:" >&2
    echo "  apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  }
  as_root=(sudo)
fi
# Tools are installed for their commands: no package may start its service on this machine meanwhile.
policy=/usr/sbin/policy-rc.d
if [[ ! -e "$policy" ]]; then
  trap '"${as_root[@]}" rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
  "${as_root[@]}" chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
