# Sourced by the other scripts: builds a folder, quietly unless that fails.
#
#     build FOLDER [meson options...]

quietly() {
	local log
	log=$(mktemp)
	if ! "$@" >"$log" 2>&1; then
		tail -n 60 "$log" >&2
		rm -f "$log"
		return 1
	fi
	rm -f "$log"
}

build() {
	local folder=$1
	shift
	if [[ ! -f $folder/build.ninja ]]; then
		quietly meson setup "$folder" "$@" || return 1
	fi
	quietly ninja -C "$folder"
}
