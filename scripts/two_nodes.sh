#!/usr/bin/env bash
# A launch on two nodes, rehearsed on one machine: two network namespaces joined by a veth pair stand for the nodes, with
# one torchrun and one process in each. They share nothing but that link and the file system. Needs root and `ip`.
#
#   scripts/two_nodes.sh sft run=demo deepspeed=zero2 pretrain.optimizer=adamw …
#
# PYTHON: the interpreter (python). Ends with the exit code of the first node.
set -euo pipefail

python=${PYTHON:-python}
nodes=(rlhf-node-0 rlhf-node-1)
addresses=(10.77.0.1 10.77.0.2)

leave() {
    for node in "${nodes[@]}"; do ip netns delete "$node" 2>/dev/null || true; done
}
trap leave EXIT
leave

for node in "${nodes[@]}"; do ip netns add "$node"; done
ip link add veth-0 netns "${nodes[0]}" type veth peer name veth-1 netns "${nodes[1]}"
for i in 0 1; do
    ip -n "${nodes[$i]}" address add "${addresses[$i]}/24" dev "veth-$i"
    ip -n "${nodes[$i]}" link set "veth-$i" up
    ip -n "${nodes[$i]}" link set lo up
done

node() {
    ip netns exec "${nodes[$1]}" env "GLOO_SOCKET_IFNAME=veth-$1" "NCCL_SOCKET_IFNAME=veth-$1" \
        "$python" -m torch.distributed.run --nnodes 2 --node-rank "$1" --nproc-per-node 1 \
        --master-addr "${addresses[0]}" --master-port 29500 -m rlhf "${@:2}"
}

node 1 "$@" &
second=$!
code=0
node 0 "$@" || code=$?
wait "$second" || true
for i in 0 1; do ip -n "${nodes[$i]}" -s -h link show "veth-$i"; done
exit "$code"
