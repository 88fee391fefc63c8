/* A stand-in for the CUDA driver, so that the probe's GPU paths run on a machine without a GPU.

   "Device" memory is a shared-memory file, mapped; exporting it gives away its name, and opening
   maps the same file, as CUDA IPC does. What the CPU may do with it is set by FAKE_CUDA:

     aware     anything: MPI sends it like host memory, as if it were CUDA-aware
     unaware   nothing: whoever touches it, MPI above all, ends by a segmentation fault
     wrong     anything, but what is written arrives changed
     noipc     as unaware, and exporting is an error
     none      there is a driver and no GPU
     broken    cuInit fails
*/
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;

static struct { char *at; size_t size; char name[64]; } memory[64];
static int used;

static int mode_is(const char *name)
{
    const char *mode = getenv("FAKE_CUDA");
    return mode != NULL && strcmp(mode, name) == 0;
}

static int hidden(void) { return mode_is("unaware") || mode_is("noipc"); }

static int block_of(CUdeviceptr pointer)
{
    for (int i = 0; i < used; i++)
        if ((char *)pointer >= memory[i].at && (char *)pointer < memory[i].at + memory[i].size)
            return i;
    return -1;
}

static void allow(int block, int yes)
{
    int protection = yes || !hidden() ? PROT_READ | PROT_WRITE : PROT_NONE;
    mprotect(memory[block].at, memory[block].size, protection);
}

static CUresult add(const char *name, size_t size, int create, CUdeviceptr *pointer)
{
    int file = shm_open(name, create ? O_CREAT | O_RDWR : O_RDWR, 0600);
    if (file < 0 || used == 64 || (create && ftruncate(file, size) != 0))
        return 2;
    if (!create)
        size = lseek(file, 0, SEEK_END);
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED)
        return 2;
    memory[used].at = at;
    memory[used].size = size;
    snprintf(memory[used].name, sizeof memory[used].name, "%s", name);
    allow(used, 0);
    used++;
    *pointer = (CUdeviceptr)at;
    return 0;
}

__attribute__((destructor)) static void forget(void)
{
    for (int i = 0; i < used; i++)
        shm_unlink(memory[i].name);
}

CUresult cuInit(unsigned flags) { return mode_is("broken") ? 999 : 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13010; return 0; }
CUresult cuDeviceGetCount(int *count) { *count = mode_is("none") ? 0 : 2; return 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = &used; return 0; }
CUresult cuCtxSetCurrent(void *context) { return 0; }
CUresult cuCtxSynchronize(void) { return 0; }

CUresult cuGetErrorString(CUresult code, const char **text)
{
    *text = code == 2 ? "out of memory" : code == 801 ? "operation not supported" : "unknown error";
    return 0;
}

CUresult cuDeviceGetName(char *name, int room, int device)
{
    snprintf(name, room, "Imaginary GPU");
    return 0;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 8ull << 30; return 0; }

CUresult cuDeviceGetUuid(unsigned char *uuid, int device)
{
    memset(uuid, 0x11 * (device + 1), 16);
    return 0;
}

CUresult cuDeviceCanAccessPeer(int *able, int device, int peer)
{
    *able = device != peer;
    return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size)
{
    char name[64];
    snprintf(name, sizeof name, "/mpiring-fake-%d-%d", getpid(), used);
    return add(name, size, 1, pointer);
}

CUresult cuMemAllocHost_v2(void **pointer, size_t size)
{
    *pointer = malloc(size);
    return *pointer == NULL ? 2 : 0;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size)
{
    int block = block_of(target);
    allow(block, 1);
    memcpy((void *)target, source, size);
    if (mode_is("wrong"))
        ((char *)target)[size / 2] ^= 1;
    allow(block, 0);
    return 0;
}

CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t size)
{
    int block = block_of(source);
    allow(block, 1);
    memcpy(target, (void *)source, size);
    allow(block, 0);
    return 0;
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t size)
{
    int from = block_of(source), to = block_of(target);
    allow(from, 1);
    allow(to, 1);
    memcpy((void *)target, (void *)source, size);
    allow(from, 0);
    allow(to, 0);
    return 0;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    if (mode_is("noipc"))
        return 801;
    snprintf(handle->reserved, sizeof handle->reserved, "%s", memory[block_of(pointer)].name);
    return 0;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
    return add(handle.reserved, 0, 0, pointer);
}
