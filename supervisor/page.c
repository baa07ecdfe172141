#include "supervisor/page.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/err.h"
#include "base/own.h"

int page_new(int *ret_fd, uint64_t *ret_inode, const uint8_t *nonce, uint32_t rank,
	     uint32_t attempt, struct err *err)
{
	struct control_page page = {
		.magic = PAGE_MAGIC,
		.version = PAGE_VERSION,
		.size = PAGE_SIZE,
		.rank = rank,
		.attempt = attempt,
	};
	OWN_FD int fd = memfd_create("accel-page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	struct stat st;

	if (fd < 0)
		return err_sys(err, "control page");
	memcpy(page.nonce, nonce, NONCE_SIZE);
	if (ftruncate(fd, PAGE_SIZE) < 0 ||
	    pwrite(fd, &page, sizeof(page), 0) != (ssize_t)sizeof(page) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 ||
	    fstat(fd, &st) < 0)
		return err_sys(err, "control page");
	*ret_inode = st.st_ino;
	*ret_fd = take_fd(&fd);
	return 0;
}
