/* What Host.java calls. */
#include <jni.h>
#include <memfold.h>

static memfold *limit;

JNIEXPORT jobject JNICALL Java_Host_map(JNIEnv *environment, jclass class, jlong bytes, jlong most) {
    memfold_options options = {.size = sizeof options, .limit_bytes = (size_t)most};
    void *memory;
    (void)class;
    if (memfold_new(&options, &limit) || memfold_map(limit, (size_t)bytes, &memory))
        return NULL;
    return (*environment)->NewDirectByteBuffer(environment, memory, bytes);
}

JNIEXPORT jlong JNICALL Java_Host_pagesIn(JNIEnv *environment, jclass class) {
    memfold_stats stats = {.size = sizeof stats};
    (void)environment, (void)class;
    return memfold_get_stats(limit, &stats) ? -1 : (jlong)stats.pages_in;
}
