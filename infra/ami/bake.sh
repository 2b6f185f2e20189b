#!/usr/bin/env bash
# Runs as root on the building instance: makes the layers' file system, pulls the agent's image, unpacks the layers.
set -euo pipefail

# The name that EC2 gives the second volume, or the link to it; as module host's user data looks for it.
disk=$(readlink --canonicalize-existing /dev/xvdb 2>/dev/null || readlink --canonicalize-existing /dev/sdb)
mkfs.xfs -q -m reflink=1 "$disk"
mkdir -p /var/lib/shoal
mount -o noatime,prjquota "$disk" /var/lib/shoal

# A registry of ECR wants a login; a public image none.
registry=${AGENT_IMAGE%%/*}
if [[ $registry == *.dkr.ecr.* ]]; then
    command -v aws >/dev/null || dnf install --quiet --assumeyes awscli-2
    aws ecr get-login-password --region "$REGION" | docker login --username AWS --password-stdin "$registry"
fi
docker pull --quiet "$AGENT_IMAGE"
docker logout "$registry" >/dev/null 2>&1 || true
rm -f ~root/.docker/config.json

# Unpacking keeps owners, devices and capabilities: root, but nothing else of a privileged container.
shopt -s nullglob
blobs=(/tmp/layers/*.tar.zst)
if [ ${#blobs[@]} -gt 0 ]; then
    docker run --rm --network none --cap-add SYS_ADMIN --cap-add MKNOD \
        --volume /var/lib/shoal:/var/lib/shoal --volume /tmp/layers:/tmp/layers:ro \
        --entrypoint python3 "$AGENT_IMAGE" -m runtime_image.image.bake "${blobs[@]}"
fi
rm -rf /tmp/layers

# Nothing of this instance stays: names, keys, logs, ECS's own state.
umount /var/lib/shoal
systemctl stop ecs || true
rm -rf /var/lib/ecs/data/* /var/log/ecs/* /etc/ssh/ssh_host_* ~ec2-user/.ssh/authorized_keys ~root/.ssh
cloud-init clean --logs --seed
sync
