#!/bin/bash
# Builds what kubernetes.sh runs into FOLDER: kubernetes-build.sh FOLDER PLUGIN. Kubernetes is taken from Go's module proxy,
# and verified by Go's checksum database; PLUGIN is a clone of https://github.com/squat/generic-device-plugin. Wants Go, a
# quarter of an hour on two CPUs, and 4 GB below FOLDER.
set -euo pipefail
version=1.34.2
plugin="$(realpath "$2")"
mkdir -p "$1"
folder="$(realpath "$1")"
cd "$folder"
export GOFLAGS="-mod=mod -buildvcs=false" GOPATH="$folder/modules" GOCACHE="$folder/cache"
(cd "$plugin" && CGO_ENABLED=0 GOFLAGS=-buildvcs=false go build -mod=vendor -o "$folder/" .)
go mod download "k8s.io/kubernetes@v$version"
rm -rf source
cp -r "$(go env GOMODCACHE)/k8s.io/kubernetes@v$version" source
chmod -R u+w source
cd source
rm -rf go.work vendor
# Parts that the repository has in a folder, and the proxy as modules of their own.
sed -nE 's#^\s*(k8s\.io/\S+) => \./staging.*#\1#p' go.mod | while read -r module; do
    go mod edit -dropreplace="$module" -require="$module@v0.${version#1.}"
done
go build -o "$folder/" ./cmd/kubelet ./cmd/kube-apiserver ./cmd/kube-controller-manager ./cmd/kube-scheduler ./cmd/kubectl
