/* Preloaded into the program by tests (LD_PRELOAD): makes its nth allocation, or its nth call on
 * some files, fail. Python tests compile it with the system's compiler (tests/support/inject.py).
 *
 *   INJECT_RANK    the process that is affected: a local rank, or "launcher"
 *   INJECT_AT      the number of the call that fails, from 1; 0: none, calls are only counted
 *   INJECT_ONLY    1: only this call fails; otherwise all later ones too
 *   INJECT_COUNT   a file that receives the number of calls, one line per process
 *   INJECT_STACKS  a file that receives, with INJECT_AT=0, the number of the first allocation of
 *                  each call stack
 *   INJECT_WHAT    "memory", or what happens to calls on files whose path contains INJECT_PATH:
 *                  "EIO", "ENOSPC", "short" (the call moves half of the bytes, once), "gone"
 *                  (ENOENT and ESTALE), "fault" (SIGBUS, as from a mapped file on a failing disk),
 *                  "kill" (SIGKILL before the call)
 *   INJECT_CALLS   the calls on files: letters of o (open), r (read), w (write), s (sync), n
 *                  (rename, mkdir, symlink), m (mmap), u (unlink, rmdir, remove, ftruncate);
 *                  default all but u */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_long calls;
static long at;
static int only, ready;
static enum { NOTHING, MEMORY, FILES } kind;
static int error_number;
static int is_short, is_fault, is_kill;
static const char *path_part, *letters;

/* A hash table of the call stacks that have allocated. */
enum { STACKS = 1 << 16, DEPTH = 48 };
static FILE *stacks_file;
static uint64_t stacks[STACKS];
static atomic_flag noting = ATOMIC_FLAG_INIT;
static __thread int within;

static void note_stack(long n)
{
    void *frames[DEPTH];
    uint64_t hash = 1;
    within = 1;
    const int depth = backtrace(frames, DEPTH);
    for (int i = 2; i < depth; i++) hash = (hash ^ (uintptr_t)frames[i]) * 1099511628211U;
    while (atomic_flag_test_and_set(&noting)) continue;
    size_t slot = (size_t)(hash % STACKS);
    while (stacks[slot] != 0 && stacks[slot] != hash) slot = (slot + 1) % STACKS;
    if (stacks[slot] == 0) {
        stacks[slot] = hash;
        fprintf(stacks_file, "%ld\n", n);
    }
    atomic_flag_clear(&noting);
    within = 0;
}

static void open_stacks(void)
{
    void *frame;
    backtrace(&frame, 1); /* loads the unwinder, which allocates */
    stacks_file = fopen(getenv("INJECT_STACKS"), "a");
    if (stacks_file)
        fputs("", stacks_file);
}

static void begin(void)
{
    const char *rank = getenv("QUADRILLE_RANK"), *wanted = getenv("INJECT_RANK"), *what = getenv("INJECT_WHAT");
    ready = 1;
    if (!what || !wanted || strcmp(wanted, rank ? rank : "launcher") != 0)
        return;
    at = atol(getenv("INJECT_AT") ? getenv("INJECT_AT") : "0");
    only = getenv("INJECT_ONLY") != NULL;
    path_part = getenv("INJECT_PATH");
    letters = getenv("INJECT_CALLS") ? getenv("INJECT_CALLS") : "orwsnm";
    is_short = strcmp(what, "short") == 0;
    is_fault = strcmp(what, "fault") == 0;
    is_kill = strcmp(what, "kill") == 0;
    error_number = strcmp(what, "ENOSPC") == 0 ? ENOSPC : EIO;
    if (strcmp(what, "gone") == 0)
        error_number = ESTALE;
    if (getenv("INJECT_STACKS") && at == 0)
        open_stacks();
    kind = strcmp(what, "memory") == 0 ? MEMORY : FILES;
}

/* Calls count from main() on: what libraries do as they are loaded is theirs (the CUDA run time
 * crashes if it has no memory then). */
static int (*program)(int, char **, char **);

static int counted(int count, char **arguments, char **environment)
{
    begin();
    return program(count, arguments, environment);
}

typedef int start_function(int (*)(int, char **, char **), int, char **, void (*)(void), void (*)(void), void (*)(void), void *);

int __libc_start_main(int (*main)(int, char **, char **), int count, char **arguments, void (*init)(void), void (*fini)(void),
                      void (*unload)(void), void *stack)
{
    start_function *start = (start_function *)dlsym(RTLD_NEXT, "__libc_start_main");
    program = main;
    return start(counted, count, arguments, init, fini, unload, stack);
}

__attribute__((destructor)) static void end(void)
{
    char line[32];
    const char *path = getenv("INJECT_COUNT");
    const int before = kind;
    kind = NOTHING;
    if (before != NOTHING && stacks_file)
        fflush(stacks_file);
    int fd = path && before != NOTHING ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (fd >= 0 && syscall(SYS_write, fd, line, (size_t)snprintf(line, sizeof line, "%ld\n", (long)calls)) < 0)
        return;
}

/* Ranks end with _exit(), which calls no destructors. */
void _exit(int status)
{
    end();
    syscall(SYS_exit_group, status);
    __builtin_unreachable();
}

static int fails(void)
{
    const long n = atomic_fetch_add(&calls, 1) + 1;
    if (stacks_file)
        note_stack(n);
    if (is_kill && n == at)
        kill(getpid(), SIGKILL);
    return at > 0 && (only || is_short ? n == at : n >= at);
}

static int no_memory(void)
{
    if (!ready || kind != MEMORY || within || !fails())
        return 0;
    errno = ENOMEM;
    return 1;
}

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t bytes)
{
    return no_memory() ? NULL : __libc_malloc(bytes);
}
void *calloc(size_t count, size_t bytes)
{
    return no_memory() ? NULL : __libc_calloc(count, bytes);
}
void *realloc(void *memory, size_t bytes)
{
    return no_memory() ? NULL : __libc_realloc(memory, bytes);
}
void *aligned_alloc(size_t alignment, size_t bytes)
{
    return no_memory() ? NULL : __libc_memalign(alignment, bytes);
}
int posix_memalign(void **memory, size_t alignment, size_t bytes)
{
    void *made = no_memory() ? NULL : __libc_memalign(alignment, bytes);
    if (!made)
        return ENOMEM;
    *memory = made;
    return 0;
}

static int concerns(char letter, const char *path)
{
    return kind == FILES && strchr(letters, letter) && path_part && path && strstr(path, path_part);
}

static int concerns_fd(char letter, int fd)
{
    char link[64], path[4096];
    if (kind != FILES || fd < 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    return concerns(letter, path);
}

static int refuse(int with)
{
    if (is_fault)
        raise(SIGBUS);
    errno = with;
    return -1;
}

/* For calls that have no bytes to move half of. */
#define REFUSE_IF(concern) \
    if ((concern) && fails() && !is_short) return refuse(error_number == ESTALE ? ENOENT : error_number)
/* For calls that move `count` bytes. */
#define CUT_IF(concern, count)                 \
    if ((concern) && fails()) {                \
        if (!is_short)                         \
            return refuse(error_number);       \
        (count) = (count) > 1 ? (count) / 2 : (count); \
    }
#define NEXT(result, name, ...)                            \
    static result (*next)(__VA_ARGS__);                    \
    if (!next)                                             \
        next = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int opens(const char *path, int flags, mode_t mode)
{
    REFUSE_IF(concerns('o', path));
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
static mode_t mode_of(int flags, va_list more)
{
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
}
#define OPEN(name)                             \
    int name(const char *path, int flags, ...) \
    {                                          \
        va_list more;                          \
        va_start(more, flags);                 \
        mode_t mode = mode_of(flags, more);    \
        va_end(more);                          \
        return opens(path, flags, mode);       \
    }
OPEN(open)
OPEN(open64)

FILE *fopen(const char *path, const char *mode)
{
    NEXT(FILE *, "fopen", const char *, const char *);
    if (concerns('o', path) && fails() && !is_short) {
        refuse(error_number == ESTALE ? ENOENT : error_number);
        return NULL;
    }
    return next(path, mode);
}
FILE *fopen64(const char *path, const char *mode)
{
    return fopen(path, mode);
}
DIR *opendir(const char *path)
{
    NEXT(DIR *, "opendir", const char *);
    if (concerns('o', path) && fails() && !is_short) {
        refuse(error_number == ESTALE ? ENOENT : error_number);
        return NULL;
    }
    return next(path);
}
ssize_t read(int fd, void *to, size_t count)
{
    CUT_IF(concerns_fd('r', fd), count);
    return syscall(SYS_read, fd, to, count);
}
ssize_t pread64(int fd, void *to, size_t count, off64_t offset)
{
    CUT_IF(concerns_fd('r', fd), count);
    return syscall(SYS_pread64, fd, to, count, offset);
}
ssize_t pread(int fd, void *to, size_t count, off_t offset)
{
    return pread64(fd, to, count, offset);
}
ssize_t write(int fd, const void *from, size_t count)
{
    CUT_IF(concerns_fd('w', fd), count);
    return syscall(SYS_write, fd, from, count);
}
ssize_t pwrite64(int fd, const void *from, size_t count, off64_t offset)
{
    CUT_IF(concerns_fd('w', fd), count);
    return syscall(SYS_pwrite64, fd, from, count, offset);
}
ssize_t pwrite(int fd, const void *from, size_t count, off_t offset)
{
    return pwrite64(fd, from, count, offset);
}
int fsync(int fd)
{
    REFUSE_IF(concerns_fd('s', fd));
    return 0; /* waiting for a real disk would only slow tests down */
}
int fdatasync(int fd)
{
    return fsync(fd);
}
int rename(const char *from, const char *to)
{
    REFUSE_IF(concerns('n', to));
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    REFUSE_IF(concerns('n', to));
    return (int)syscall(SYS_renameat2, a, from, b, to, flags);
}
int mkdir(const char *path, mode_t mode)
{
    REFUSE_IF(concerns('n', path));
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}
int symlink(const char *target, const char *path)
{
    REFUSE_IF(concerns('n', path));
    return (int)syscall(SYS_symlinkat, target, AT_FDCWD, path);
}
int unlink(const char *path)
{
    REFUSE_IF(concerns('u', path));
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
int rmdir(const char *path)
{
    REFUSE_IF(concerns('u', path));
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}
int remove(const char *path)
{
    NEXT(int, "remove", const char *);
    REFUSE_IF(concerns('u', path));
    return next(path);
}
int ftruncate64(int fd, off64_t length)
{
    REFUSE_IF(concerns_fd('u', fd));
    return (int)syscall(SYS_ftruncate, fd, length);
}
int ftruncate(int fd, off_t length)
{
    return ftruncate64(fd, length);
}
void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset)
{
    if ((flags & MAP_ANONYMOUS ? no_memory() : concerns_fd('m', fd) && fails() && !is_short && !is_fault)) {
        if (!(flags & MAP_ANONYMOUS))
            errno = ENODEV;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}
void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    return mmap64(address, length, protection, flags, fd, offset);
}
