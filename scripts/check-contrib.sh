#!/usr/bin/env bash
# Checks that a build of the last commit, tagged with the newest version in
# CHANGELOG.md, reports that version. Then runs the build command of
# contrib/docker/Dockerfile on that commit, without the files that Docker does not get,
# and validates the Caddyfiles of contrib with what it builds. Needs git; starts no
# container.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

git clone -q "$PWD" "$dir/clone"
cp contrib/kubernetes/caddy.yaml "$dir"
cd "$dir/clone"

version=v$(sed -n 's/^## \([0-9][0-9.]*\).*/\1/p' CHANGELOG.md | head -1)
module=$(sed -n 's/^module //p' go.mod)
git -c tag.gpgSign=false tag -f "$version" >/dev/null
GOFLAGS='' CGO_ENABLED=0 go build -buildvcs=true -o "$dir/tagged" ./cmd/caddy
reported=$("$dir/tagged" build-info | sed -n "s|^mod[[:space:]]*$module[[:space:]]*||p")
if [ "${reported%%[[:space:]]*}" != "$version" ]; then
	echo "a build of $version reports ${reported:-no version}" >&2
	exit 1
fi
echo "a build of $version reports $version"

while read -r pattern; do
	case $pattern in
	'' | '#'*) ;;
	'**/'*) find . -name "${pattern#'**/'}" -prune -exec rm -rf {} + ;;
	*) rm -rf "./${pattern#/}" ;;
	esac
done <contrib/docker/Dockerfile.dockerignore
command=$(sed -n 's/^RUN \(CGO_ENABLED=0 go build .*\)/\1/p' contrib/docker/Dockerfile)
echo "$command"
bash -c "${command/ \/out\/caddy / $dir/caddy }"

export XDG_CONFIG_HOME=$dir XDG_DATA_HOME=$dir
echo secret >"$dir/password"
sed -n '/^  Caddyfile: |$/,/^---$/ { s/^    //p; /^$/p; }' "$dir/caddy.yaml" >"$dir/kubernetes"
cp contrib/docker/caddy/Caddyfile "$dir/compose"
for file in "$dir/compose" "$dir/kubernetes"; do
	sed "s|{file\./run/secrets/[^}]*}|{file.$dir/password}|" "$file" >"$dir/Caddyfile"
	"$dir/caddy" validate --adapter caddyfile --config "$dir/Caddyfile" >"$dir/log" 2>&1 || {
		cat "$dir/log"
		exit 1
	}
	echo "valid: the Caddyfile of ${file##*/}"
done
