{{- define "sandboxer.labels" -}}
app.kubernetes.io/name: sandboxer
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "sandboxer.installer" -}}
{{ printf "%s-installer" .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end -}}

{{- define "sandboxer.installerSelector" -}}
app.kubernetes.io/name: sandboxer
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: installer
{{- end -}}

{{/* Annotations of what exists while the chart is deleted, made in the order of the weights. */}}
{{- define "sandboxer.ofRemoval" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* The label of a node whose daemon answers. */}}
{{- define "sandboxer.nodeLabel" -}}io.sandboxer/node{{- end -}}

{{/* A value of TOML. Helm reads all numbers as floats. */}}
{{- define "sandboxer.tomlValue" -}}
{{- if kindIs "string" . -}}{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}
{{- else if kindIs "slice" . -}}{{ toJson . }}
{{- else if kindIs "map" . -}}
{ {{- range $n, $key := keys . | sortAlpha }}{{ if $n }},{{ end }} {{ $key | quote }} = {{ include "sandboxer.tomlValue" (get $ $key) }}{{ end }} }
{{- else -}}{{ . }}
{{- end -}}
{{- end -}}

{{/* The daemon's configuration. */}}
{{- define "sandboxer.config" -}}
# Written by the chart sandboxer: change its value installer.config instead.
{{- $chosen := .Values.installer.config }}
{{- range $key, $value := $chosen }}
{{- if not (kindIs "map" $value) }}
{{ $key }} = {{ include "sandboxer.tomlValue" $value }}
{{- end }}
{{- end }}
{{- if .Values.metrics.enabled }}
metrics_listen = "0.0.0.0:{{ int .Values.metrics.port }}"
{{- end }}
{{- $prefix := .Values.installer.prefix }}
{{- $guest := dict "kernel" (printf "%s/lib/vmlinux" $prefix) "initramfs" (printf "%s/lib/initramfs.cpio" $prefix) }}
{{- range $table, $keys := merge (dict "vm" (merge $guest (default dict $chosen.vm))) $chosen }}
{{- if kindIs "map" $keys }}

[{{ $table }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ include "sandboxer.tomlValue" $value }}
{{- end }}
{{- end }}
{{- end }}

[handlers]
{{- range $name, $class := .Values.runtimeClasses }}
{{- if or $class.vmm $class.startPath }}
{{ $name }} = { {{ with $class.vmm }}vmm = "{{ . }}"{{ if $class.startPath }}, {{ end }}{{ end }}{{ with $class.startPath }}start_path = "{{ . }}"{{ end }} }
{{- end }}
{{- end }}
{{ end -}}

{{/* containerd's drop-in. */}}
{{- define "sandboxer.dropIn" -}}
# Written by the chart sandboxer.
version = 3

[proxy_plugins.sandboxer]
  type = "sandbox"
  address = "/run/sandboxer/controller.sock"
{{- range $name, $class := .Values.runtimeClasses }}

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{{ $name }}]
  runtime_type = "io.containerd.sandboxer.v1"
  runtime_path = "{{ $.Values.installer.prefix }}/bin/containerd-shim-sandboxer-v1"
  sandboxer = "sandboxer"
  snapshotter = "{{ $.Values.installer.containerd.snapshotter }}"
  pod_annotations = ["io.sandboxer.*"]
  disable_pause_image_pull = true
{{- end }}
{{ end -}}

{{/* Programs that a node needs, by the VMMs that are named. */}}
{{- define "sandboxer.programs" -}}
{{- $vm := default dict .Values.installer.config.vm }}
{{- $rootfs := default dict .Values.installer.config.rootfs }}
{{- $qemu := default "qemu-system-x86_64-microvm|qemu-system-x86_64" $vm.qemu }}
{{- $ch := default "cloud-hypervisor" $vm.cloud_hypervisor }}
{{- $of := dict "qemu" $qemu "cloud-hypervisor" $ch "firecracker" (default "firecracker" $vm.firecracker) "auto" (printf "%s|%s" $qemu $ch) }}
{{- $programs := list (default "mkfs.erofs" $rootfs.mkfs_erofs) "mkfs.ext4" (get $of (default "auto" $vm.vmm)) }}
{{- range $_, $class := .Values.runtimeClasses }}
{{- with $class.vmm }}{{ $programs = append $programs (get $of .) }}{{ end }}
{{- end }}
{{- join " " (uniq $programs) }}
{{- end -}}
