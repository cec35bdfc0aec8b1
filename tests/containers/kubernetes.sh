#!/bin/bash
# packaging/kubernetes in a cluster of one node, which is made for it and goes with it. As root.
#
#   kubernetes.sh FOLDER PROGRAM FILE...     a pod runs `memfold run --limit 85% --stats - -- PROGRAM` in 128 MiB
#
# FOLDER has what kubernetes-build.sh put there. FILEs, memfold among them, are in the image, in /usr/bin; PROGRAM is words
# split at spaces. The output of the pod is printed, and its exit code is this script's. Wants etcd-server, containerd, runc,
# containernetworking-plugins, podman, crun, openssl, iptables. With KEEP=1 the logs stay.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if [ -z "${MEMFOLD_OWN_MOUNTS:-}" ]; then
    # Mounts, processes and networks that end with this one.
    MEMFOLD_OWN_MOUNTS=1 exec unshare --mount --pid --net --fork --kill-child --mount-proc "$0" "$@"
fi
binaries="$(realpath "$1")" program="$2"
shift 2
export PATH="$binaries:$PATH"
manifests="$here/../../packaging/kubernetes"
name="memfold-tests-$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')"
work="$(mktemp -d /var/tmp/memfold-XXXXXX)"
end() {
    status=$?
    # What runs in pods, then what runs them: all is this PID namespace's.
    kill -KILL -1 2> /dev/null || true
    sleep 1
    find /sys/fs/cgroup -depth -type d -path "*/$name*" -exec rmdir {} + 2> /dev/null || true
    umount -R -l /var/lib/kubelet /var/lib/cni /var/log /run || true
    # Of no use to anything else, if they are empty.
    rmdir /var/lib/kubelet /var/lib/cni 2> /dev/null || true
    if [ -n "${KEEP:-}" ]; then echo "kept: $work" >&2; else rm -rf "$work"; fi
    exit "$status"
}
trap end EXIT

# Folders that these programs have for themselves, and a device of the group that a package's rule would give it.
mkdir -p /var/lib/kubelet /var/lib/cni "$work/kubelet"
mount -t tmpfs logs /var/log
mount -t tmpfs networks /var/lib/cni
mount --bind "$work/kubelet" /var/lib/kubelet
mount --make-rshared /var/lib/kubelet
mount -t tmpfs -o mode=755 run /run
minor="$(awk '$2 == "userfaultfd" { print $1 }' /proc/misc)"
mknod -m 660 "$work/userfaultfd" c 10 "$minor"
chgrp 64000 "$work/userfaultfd"
mount --bind "$work/userfaultfd" /dev/userfaultfd
if [ -d /sys/fs/cgroup/unified ]; then umount /sys/fs/cgroup/unified || true; fi
ip link set lo up
ip link add node type bridge
ip addr add 10.99.0.1/24 dev node
ip link set node up
ip route add default via 10.99.0.1

start() {
    local log="$work/$1.log"
    shift
    "$@" > "$log" 2>&1 &
    disown
}
until_true() {
    local what="$1" tries=600
    shift
    until "$@" > /dev/null 2>&1; do
        tries=$((tries - 1))
        if [ $tries = 0 ]; then
            echo "kubernetes.sh: $what did not come; the ends of the logs:" >&2
            kubectl get events -A --field-selector type=Warning >&2 || true
            tail -n 5 "$work"/*.log >&2
            exit 1
        fi
        sleep 0.2
    done
}

mkdir "$work/cni"
cat > "$work/cni/pods.conflist" << END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "isGateway": true,
 "ipam": {"type": "host-local", "subnet": "10.98.0.0/24"}}]}
END
cat > "$work/containerd.toml" << END
version = 2
root = "$work/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/memfold-tests:pause"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "$work/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
END
start containerd containerd --config "$work/containerd.toml"
image() {
    local tag="$1" command="$2"
    shift 2
    local podman=(podman --root "$work/podman" --runroot /run/podman --storage-driver vfs --events-backend none)
    "$here/image.sh" "$work/image" "$@" |
        "${podman[@]}" import --change "ENTRYPOINT $command" - "localhost/memfold-tests:$tag" > /dev/null 2>&1
    "${podman[@]}" save "localhost/memfold-tests:$tag" 2> /dev/null |
        ctr --address /run/containerd.sock -n k8s.io images import --snapshotter native - > /dev/null
}
until_true containerd ctr --address /run/containerd.sock version
image pause '["/bin/sleep", "1000000"]'
image plugin '["/usr/bin/generic-device-plugin"]' "$binaries/generic-device-plugin"
image worker '["/bin/sh"]' "$@"

start etcd etcd --data-dir "$work/etcd" --listen-peer-urls http://127.0.0.1:2380
openssl genrsa -out "$work/accounts.key" 2048 2> /dev/null
token="$(od -An -N16 -tx8 /dev/urandom | tr -d ' ')"
echo "$token,admin,admin,system:masters" > "$work/tokens"
chmod 600 "$work/tokens"
export KUBECONFIG="$work/kubeconfig"
cat > "$KUBECONFIG" << END
{"apiVersion": "v1", "kind": "Config", "current-context": "c",
 "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": true}}],
 "users": [{"name": "admin", "user": {"token": "$token"}}],
 "contexts": [{"name": "c", "context": {"cluster": "c", "user": "admin"}}]}
END
start apiserver kube-apiserver --etcd-servers http://127.0.0.1:2379 --cert-dir "$work/certificates" \
    --token-auth-file "$work/tokens" --authorization-mode RBAC --service-cluster-ip-range 10.97.0.0/24 \
    --service-account-issuer https://kubernetes --service-account-key-file "$work/accounts.key" \
    --service-account-signing-key-file "$work/accounts.key" --allow-privileged=true --endpoint-reconciler-type none \
    --kubelet-preferred-address-types InternalIP
until_true apiserver kubectl get --raw /readyz
start controllers kube-controller-manager --kubeconfig "$KUBECONFIG" --leader-elect=false \
    --service-account-private-key-file "$work/accounts.key" --cert-dir "$work/certificates"
start scheduler kube-scheduler --kubeconfig "$KUBECONFIG" --leader-elect=false --cert-dir "$work/certificates"
cat > "$work/kubelet.json" << END
{"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration", "cgroupDriver": "cgroupfs",
 "containerRuntimeEndpoint": "unix:///run/containerd.sock", "failSwapOn": false, "cgroupRoot": "/$name",
 "cgroupsPerQOS": true, "enforceNodeAllocatable": [], "localStorageCapacityIsolation": false,
 "imageGCHighThresholdPercent": 100, "evictionHard": {"memory.available": "1Mi"}, "resolvConf": "",
 "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
 "authorization": {"mode": "AlwaysAllow"}}
END
for controller in /sys/fs/cgroup/*/; do mkdir -p "$controller/$name"; done
start kubelet kubelet --kubeconfig "$KUBECONFIG" --config "$work/kubelet.json" --hostname-override node \
    --cert-dir "$work/certificates"

# No registry: the images are the node's.
sed 's#^\( *\)image: .*generic-device-plugin#\1image: localhost/memfold-tests:plugin\n\1imagePullPolicy: Never#' \
    "$manifests/device-plugin.yaml" | kubectl apply -f - > /dev/null
has_device() {
    [ "$(kubectl get node node -o 'jsonpath={.status.allocatable.squat\.ai/userfaultfd}')" = 100 ]
}
until_true "the device of the plug-in" has_device
kubectl create namespace strict > /dev/null
kubectl label namespace strict pod-security.kubernetes.io/enforce=restricted > /dev/null
until_true "the service account" kubectl -n strict get serviceaccount default
command="$(printf ', "%s"' --stats - -- $program)"
sed -e 's#image: IMAGE#image: localhost/memfold-tests:worker\n      imagePullPolicy: Never#' -e "s#, --, ./program\]#$command]#" \
    -e "s#memory: 2Gi#memory: 128Mi#" "$manifests/worker.yaml" | kubectl -n strict apply -f - > /dev/null
has_ended() {
    phase="$(kubectl -n strict get pod worker -o 'jsonpath={.status.phase}')"
    [ "$phase" = Succeeded ] || [ "$phase" = Failed ]
}
until_true "the end of the pod" has_ended
kubectl -n strict logs worker
exit "$(kubectl -n strict get pod worker -o 'jsonpath={.status.containerStatuses[0].state.terminated.exitCode}')"
