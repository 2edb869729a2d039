/* NVRTC and the driver on the host. They follow update.c and its kernels, which stand before this
 * text; TEXT is the source of update.c, and KERNELS rows of (line that defines it, name, kernel).
 *
 * Compiling looks a line up; the image that it gives names the kernel. Launching runs its threads one
 * after another. As on a device, a call without a current context fails, and a function belongs to the
 * context in which it was loaded. Calls are logged, and any of them can be told to fail.
 */
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

struct Program {
    std::string source, log, image, ptx;
};
struct Function {
    std::string name;
    void (*kernel)(job);
    void *context;
};
struct Row {
    const char *line, *name;
    void (*kernel)(job);
};

static const Row rows[] = {KERNELS};
static std::mutex guard;
static std::vector<std::string> calls;
static std::map<std::string, int> failing;
static std::vector<int> archs{75, 80, 90};
static int contexts[4];
static thread_local bool misaligned;
static thread_local std::vector<void *> current;

static int called(const char *name, const std::string &with) {
    std::lock_guard<std::mutex> hold(guard);
    calls.push_back(with.empty() ? name : std::string(name) + " " + with);
    auto found = failing.find(name);
    return found == failing.end() ? 0 : found->second;
}
#define CALLED(with)                                                                               \
    if (int status = called(__func__, with)) return status

/* What the compiler calls where -fsanitize=alignment finds an address that does not fit its type. */
extern "C" void __ubsan_handle_type_mismatch_v1(void *, void *) { misaligned = true; }

/* -- for tests --------------------------------------------------------------------------------- */

API void fake_reset() {
    calls.clear();
    failing.clear();
    archs = {75, 80, 90};
}
API void fake_fail(const char *name, int status) { failing[name] = status; }
API void fake_archs(const int *given, int count) { archs.assign(given, given + count); }
API int fake_current() { return (int)current.size(); }
API const char *fake_calls() {
    static std::string all;
    all.clear();
    for (auto &each : calls) all += each + "\n";
    return all.c_str();
}

/* -- NVRTC ------------------------------------------------------------------------------------- */

API int nvrtcGetNumSupportedArchs(int *count) {
    CALLED("");
    *count = (int)archs.size();
    return 0;
}
API int nvrtcGetSupportedArchs(int *found) {
    CALLED("");
    std::copy(archs.begin(), archs.end(), found);
    return 0;
}
API int nvrtcCreateProgram(Program **made, const char *source, const char *name, int headers,
                           const char *const *texts, const char *const *names) {
    CALLED(name);
    if (headers || texts || names) return 3;
    *made = new Program{source, "", "", ""};
    return 0;
}
API int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    std::string said;
    for (int i = 0; i < count; i++) said += (i ? " " : "") + std::string(options[i]);
    program->log = "update.cu(1): note\nupdate.cu(2): error: planted\n";
    CALLED(said);
    for (auto &row : rows) {
        if (program->source != std::string(TEXT) + "\n" + row.line + "\n") continue;
        bool machine = said.find("=sm_") != std::string::npos;
        std::string image = std::string(machine ? "CUBIN" : "PTX") + '\0' + row.name;
        (machine ? program->image : program->ptx) = image + '\0';
        return 0;
    }
    program->log = "update.cu(3): error: no such kernel\n";
    return 6;
}
#define OUTPUT(what, field)                                                                        \
    API int nvrtcGet##what##Size(Program *program, size_t *size) {                                 \
        CALLED("");                                                                                  \
        *size = program->field.size();                                                             \
        return 0;                                                                                  \
    }                                                                                              \
    API int nvrtcGet##what(Program *program, char *to) {                                           \
        CALLED("");                                                                                  \
        memcpy(to, program->field.data(), program->field.size());                                  \
        return 0;                                                                                  \
    }
OUTPUT(CUBIN, image)
OUTPUT(PTX, ptx)
OUTPUT(ProgramLog, log)
API int nvrtcDestroyProgram(Program **program) {
    CALLED("");
    delete *program;
    *program = nullptr;
    return 0;
}
API const char *nvrtcGetErrorString(int status) {
    return status == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

/* -- the driver -------------------------------------------------------------------------------- */

API int cuDevicePrimaryCtxRetain(void **context, int device) {
    CALLED(std::to_string(device));
    *context = &contexts[device];
    return 0;
}
API int cuCtxPushCurrent_v2(void *context) {
    CALLED("");
    current.push_back(context);
    return 0;
}
API int cuCtxPopCurrent_v2(void **context) {
    CALLED("");
    *context = current.back();
    current.pop_back();
    return 0;
}
API int cuModuleLoadData(void **module, const char *image) {
    CALLED(image);
    if (current.empty()) return 201;
    *module = (void *)strdup(image + strlen(image) + 1);
    return 0;
}
API int cuModuleGetFunction(Function **function, void *module, const char *name) {
    CALLED(name);
    if (current.empty()) return 201;
    for (auto &row : rows)
        if (row.name == std::string(name) && row.name == std::string((char *)module)) {
            *function = new Function{name, row.kernel, current.back()};
            return 0;
        }
    return 500;
}
API int cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                       unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments,
                       void **extra) {
    std::ostringstream said;
    said << function->name << " " << gx << "x" << bx << " stream " << (size_t)stream << " device "
         << ((int *)function->context - contexts);
    CALLED(said.str());
    if (current.empty()) return 201;
    if (current.back() != function->context) return 400;
    if (gy * gz * by * bz != 1 || shared || extra || gx == 0) return 1;
    job given = *(const job *)arguments[0];
    misaligned = false;
    gridDim = {gx, 1, 1};
    blockDim = {bx, 1, 1};
    for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < bx; threadIdx.x++) function->kernel(given);
    return misaligned ? 716 : 0;
}
API int cuGetErrorString(int status, const char **said) {
    *said = status == 201 ? "invalid device context" : "an error of the driver";
    return 0;
}
